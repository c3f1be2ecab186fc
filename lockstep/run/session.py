"""What a run has around its steps: folder, ranks, checkpoints, observer, signals and progress bar."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lockstep.checkpoint.checkpoints import Checkpoints, Training
from lockstep.checkpoint.random_state import random_state, set_random_state
from lockstep.config import PretrainConfig, RLConfig, to_toml
from lockstep.data import Tokenizer
from lockstep.errors import RunStopped, UserError
from lockstep.observe import (
    Observer,
    OnMetrics,
    RunFolder,
    Timeline,
    awaits_validation,
    claim_run,
    log,
    merge_timelines,
    read_metrics,
    require_observers,
    write_report,
)
from lockstep.parallel.world import AXES
from lockstep.progress import Progress
from lockstep.run.stop import RAISED, SIGNALS, Interrupted, StopSignal
from lockstep.run.task import Metrics, StepObserver, Task
from lockstep.run.threads import fitting_threads


@runtime_checkable
class SessionTrainer(Training, Protocol):
    """A trainer, as a session needs it."""

    timeline: Timeline
    poll: Callable[[], None]


class Session:
    """One start of a run: a context manager that claims the run's folder; `running` opens the rest.

    All ranks call its methods together. `only_step`: the one step to make, without validation or checkpoint (a replay).
    """

    def __init__(
        self,
        config: PretrainConfig | RLConfig,
        trainer: SessionTrainer,
        tokenizer: Tokenizer,
        command: str,
        progress: Progress | None = None,
        on_metrics: OnMetrics | None = None,
        only_step: int = 0,
    ):
        """Raises UserError if this machine lacks what `config.observe` needs."""
        require_observers(config.observe, trainer.world.device)
        self.config, self.command, self.only_step = config, command, only_step
        self.world, self.run = trainer.world, RunFolder(Path(config.output))
        self.timeline = trainer.timeline = Timeline(self.world.rank, config.observe.timeline_steps)
        self.opened = ExitStack()
        """Closed in reverse order before the folder is released."""
        self._deadline = ExitStack()
        self._setup = ExitStack()
        """Open until `running`: a signal then ends the session at once."""
        self.step = self.start = 0
        """The last complete step, now and when the session started."""
        self.validation_pending = False
        """Whether a validation after `step` was interrupted."""
        self.worked = False
        """Whether this session has made a step or a pending validation."""
        self.metrics: Metrics = {}
        """The last ones written."""
        self.stopped_by = 0
        """The reason to stop, as `StopSignal.agreed` returns it."""
        self._trainer, self._tokenizer, self._progress, self._on_metrics = trainer, tokenizer, progress, on_metrics
        self._began = self._saved_at = time.perf_counter()
        self._rewound = False
        self.stop = StopSignal(config.faults.stop_seconds, lambda: self.checkpoints.newest)
        trainer.poll = self.stop.polling(lambda value: self.world.sum([value], AXES)[0])

    def __enter__(self) -> Session:
        """Raises UserError if the folder contains something else, or another process's run.

        From here until `running`, a signal raises Interrupted, which leaving the session turns into RunStopped.
        """
        config = self.config
        with ExitStack() as opening:
            opening.push(self.__exit__)
            self._deadline.enter_context(self.stop)
            claimed = claim_run(config.output, to_toml(config), config.resume, config.overwrite)
            self.world.on_main(lambda: self.opened.enter_context(claimed))
            self.checkpoints = Checkpoints(self.run.path, self._trainer, self._tokenizer, config)
            self._setup.enter_context(self.stop.interruptible())
            opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: Any) -> None:
        self._setup.close()
        with self._deadline:  # a signal's, which what closes here must meet too
            self.opened.__exit__(kind, error, *trace)
        if isinstance(error, Interrupted):
            name, output = signal.Signals(self.stop.received).name, self.config.output
            raise RunStopped(f"{output}: {name} ended the run as it started", 128 + self.stop.received) from error

    def resume(self, task: Task) -> None:
        """Restores trainer and task from the newest checkpoint, if the run resumes and has one.

        Removes later steps' output from the run's folder. Raises UserError as `Checkpoints.resume`, and if the run is
        to end before that step.
        """
        if not self.config.resume:
            return

        def restore(state: dict[str, Any]) -> None:
            for name, part in task.resumables.items():
                part.restore(state.get(name))

        if state := self.checkpoints.resume(restore):
            self.step = self.start = state["step"]
        if self.config.steps < self.start:
            raise UserError(
                f"{self.config.output} is at step {self.start}, but is to end at step {self.config.steps}, counted "
                "from its beginning; give more steps or epochs"
            )
        if self.world.is_main:
            # Without a checkpoint the validation before the first step is repeated, too.
            self.run.truncate(self.start or -1)
            self.run.record(to_toml(self.config))
        if state and state.get("validation_pending") and task.validates_after(self.config.steps):
            last = self.world.from_main(lambda: read_metrics(self.run.metrics)[-1:])
            self.validation_pending = awaits_validation(last, self.start)
            self.metrics = last[0] if self.validation_pending else {}

    def history(self) -> list[dict[str, Any]]:
        """The metrics of the steps before this session, on all ranks, without a line whose validation is pending."""
        lines = self.world.from_main(lambda: read_metrics(self.run.metrics))
        return lines[:-1] if self.validation_pending else lines

    @contextmanager
    def running(self) -> Iterator[None]:
        """Opens what the steps run in: threads, checkpoints, observer and progress bar."""
        self._setup.close()
        config, world, on_metrics = self.config, self.world, self.stop.guarding(self._on_metrics)
        self._began = self._saved_at = time.perf_counter()
        try:
            with (
                fitting_threads(self._trainer.model.config, config.train.tokens_per_microbatch),
                self.checkpoints,
                Observer(
                    config.observe, config.faults, self.run.path, world.rank, world.size, on_metrics, self.timeline
                ) as self.observer,
                self._bar() as self.bar,
            ):
                if self.bar is not None:
                    self.bar.reach(self.step)
                yield
        finally:
            self.stop.release()

    def _bar(self) -> Any:
        total = self.only_step or self.config.steps
        return (self._progress or Progress(self.command, total, "step")) if self.world.is_main else nullcontext()

    def is_over(self, task: Task) -> bool:
        """Whether all steps are made, or the data has ended."""
        return self.step >= (self.only_step or self.config.steps) or task.ended

    def begin(self, task: Task) -> None:
        """Runs the pending validation, or the one before the first step."""
        if not self.only_step and self.validation_pending:
            self._validate_pending(task)
        elif not self.only_step and self.start == 0 and task.validates_after(0):
            if validation := self.validate(task, 0):
                self._write(task, 0, validation)
        elif self.start and self.is_over(task):
            log.warning(
                "the run has finished at %s; to continue, give more --steps or, from its weights, --model %s and "
                "another --output",
                "the end of its data" if task.ended else f"step {self.start}",
                self.run.path,
            )
        self.stopped_by = self.stop.agreed(self.world)

    def _validate_pending(self, task: Task) -> None:
        validation = self.validate(task, self.step)
        if self.validation_pending:
            return
        added = tuple(observer.prefix for observer in task.observers if observer.prefix)
        last = {name: value for name, value in self.metrics.items() if not (added and name.startswith(added))}
        # Those that add no metrics have seen the step: their state in the checkpoint is that after it.
        again = [observer for observer in task.observers if observer.prefix]
        validation |= self._observed(again, self.step, last | validation)
        self.observer.extend(last, validation)
        self.metrics, self.worked = last | validation, True

    def next_step(self, task: Task) -> int | None:
        """The step to make; None if the run is over, was stopped, or must not continue."""
        if self.stopped_by or self.is_over(task) or self._ending(task):
            return None
        return self.step + 1

    def validates_after(self, task: Task, step: int) -> bool:
        """Whether a validation follows the step."""
        return not self.only_step and task.validates_after(step)

    def validate(self, task: Task, step: int) -> Metrics:
        """The metrics of a validation after `step`; {} if a signal interrupts it, which makes it pending.

        Restores the random state afterwards. The run's last validation is not interrupted if only the model is saved
        after it: such a checkpoint cannot be resumed.
        """
        before = random_state()
        only_model_follows = self.config.checkpoint.last_model_only and (step >= self.config.steps or task.ended)
        self.validation_pending = True
        try:
            with self.stop.deferred() if only_model_follows else nullcontext():
                metrics = task.validate(step)
        except Interrupted:
            return {}
        finally:
            set_random_state(before)
        self.validation_pending = False
        if self.bar is not None:
            self.bar.validated(step, metrics)
        return metrics

    def observe(self, task: Task, step: int, metrics: Metrics) -> None:
        """Writes a step's metrics and records, and lets the task's observers rewind the run."""
        self.step, self.worked = step, True
        self._write(task, step, metrics)
        task.record(step)
        self.stopped_by = self.stop.agreed(self.world)
        # The data is not rewound: the run continues with what follows the spike, if there is any.
        rewound = None if task.ended else next(filter(None, (o.rewind(self.checkpoints) for o in task.observers)), None)
        self._rewound = rewound is not None
        if rewound is not None:
            self.step = rewound
            self.observer.rewind(rewound)

    def _write(self, task: Task, step: int, metrics: Metrics) -> None:
        self.metrics = metrics | self._observed(task.observers, step, metrics)
        self.observer.write(step, self.metrics)

    def _observed(self, observers: Iterable[StepObserver], step: int, metrics: Metrics) -> Metrics:
        """The metrics that the task's observers add to a step's."""
        return {name: value for o in observers for name, value in o.observe(step, metrics).items()}

    def save_if_due(self, task: Task) -> None:
        """Saves the run if a checkpoint is due after the last step, or the run ends there."""
        due = self.is_over(task) or self.stopped_by or self.checkpoints.due(self.step) or self._minutes_passed()
        if due and not self._rewound and not self.only_step:
            self.save(task)

    def save(self, task: Task) -> None:
        """Saves the run as of its last complete step."""
        parts = task.resumables.items()
        state = self.world.from_main(lambda: {name: part.state() for name, part in parts})
        state |= {"validation_pending": self.validation_pending, "data_ended": task.ended}
        with self.timeline.span("checkpoint"):
            self.checkpoints.save(self.step, state, last=self.is_over(task))
        self._saved_at = time.perf_counter()

    def _minutes_passed(self) -> bool:
        """Whether the last checkpoint is older than `checkpoint.every_minutes`, by any rank's clock."""
        seconds = 60 * self.config.checkpoint.every_minutes
        if seconds == 0 or self.only_step:
            return False
        passed = time.perf_counter() - self._saved_at >= seconds
        return self.world.sum([float(passed)], AXES)[0] > 0

    def save_interrupted(self, task: Task, before: Mapping[str, Tensor]) -> None:
        """Saves the run as of its last complete step, after a signal has interrupted the next one.

        before: the random state then. Nothing is saved before the first step.
        """
        self.stopped_by = self.stop.agreed(self.world)
        self.checkpoints.wait()
        if self.step and not self.only_step and self.checkpoints.newest != self.step:
            set_random_state(before)
            self.save(task)

    def show(self, task: Task, metrics: Metrics) -> None:
        """Moves the progress bar."""
        if task.ended and self.step < self.config.steps:
            log.warning("the data ended after step %d of %d (loader.repeat is off)", self.step, self.config.steps)
        if self.bar is not None:
            self.bar.reach(self.step, "", **task.shown(metrics) | self.observer.for_terminal(metrics))

    def _ending(self, task: Task) -> BaseException | None:
        """The error of an observer that ends the run, unless all its steps are made."""
        if self.step >= self.config.steps and not self.validation_pending:
            return None
        return next(filter(None, (observer.ending() for observer in task.observers)), None)

    @property
    def last_metrics(self) -> Metrics:
        """The metrics of the run's last step, even if this session has made none."""
        return self.metrics or (read_metrics(self.run.metrics) or [{}])[-1]

    def finish(
        self,
        task: Task,
        title: str,
        summary: Callable[[], dict[str, Any]],
        events: Callable[[], list[dict[str, Any]]] = list,
    ) -> Path:
        """Writes summary, timeline and report after `running`; returns the run's folder.

        events: other processes' events, for the timeline. A run that had finished before keeps its summary. Raises the
        error that ends a run early, after writing a report without a summary.
        """
        # Another rank may still be writing the last checkpoint.
        self.world.barrier()
        finished = self.step >= self.config.steps and not self.validation_pending
        error = self._ending(task)
        if self.stopped_by == RAISED or (self.stopped_by in SIGNALS and not finished):
            error = self.stop.error(self.stopped_by, self.step, self.config.output)
        has_begun = self.step > 0 or self.config.steps == 0
        if self.world.is_main and has_begun and not self.only_step:
            self._write_ending(title, summary, events, error)
        if error:
            raise error
        return self.run.path

    def _write_ending(
        self,
        title: str,
        summary: Callable[[], dict[str, Any]],
        events: Callable[[], list[dict[str, Any]]],
        error: BaseException | None,
    ) -> None:
        keeps_summary = self.run.summary.is_file() and not self.worked
        if not keeps_summary:
            merge_timelines(self.run.path, events())
        if not (keeps_summary or error or self.validation_pending):
            values = summary() | {"seconds": {self.command: time.perf_counter() - self._began}}
            self.run.write_summary(values | ({"resumed_from": self.start} if self.start else {}))
        if error or not keeps_summary or self.run.lacks_report:
            write_report(self.run.path, title)
