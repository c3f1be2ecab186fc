"""Everything that observes a run's steps, opened and closed as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lockstep.config import FaultConfig, ObserveConfig
from lockstep.observe.determinism import determinism
from lockstep.observe.garbage import GarbageCollection
from lockstep.observe.heartbeat import Heartbeat
from lockstep.observe.logs import log, open_logs
from lockstep.observe.metrics import TOKENS, TOTAL_TOKENS, MetricsWriter, read_metrics
from lockstep.observe.profiling import Profiling, require_profiling
from lockstep.observe.run_folder import RunFolder
from lockstep.observe.sinks import require_sinks
from lockstep.observe.tables import Table
from lockstep.observe.timeline import Timeline, timeline_path
from lockstep.observe.watchdog import Watchdog, interval

OnMetrics = Callable[[int, Mapping[str, float]], None]
"""A caller's function that gets each step's number and metrics."""


def require_observers(config: ObserveConfig, device: torch.device) -> None:
    """Raises UserError for observers that do not work on this machine."""
    require_sinks(config)
    require_profiling(config, device)


class Observer:
    """Metrics, log, timeline, profiles, garbage collection and watchdog of one rank. A context manager."""

    def __init__(
        self,
        config: ObserveConfig,
        faults: FaultConfig,
        run: Path,
        rank: int = 0,
        ranks: int = 1,
        on_metrics: OnMetrics | None = None,
        timeline: Timeline | None = None,
    ):
        self.config, self.run = config, run
        self.timeline = timeline or Timeline(rank, config.timeline_steps)
        self._rank, self._ranks, self._on_metrics = rank, ranks, on_metrics
        self._profiling = Profiling(config, run, rank)
        self._garbage = GarbageCollection(config.gc_every)
        self._heartbeat = Heartbeat(run, f"rank_{rank}", self.timeline, interval(faults.watchdog_seconds))
        self._watchdog = Watchdog(self._heartbeat, rank, ranks, faults.watchdog_seconds)
        self._metrics: MetricsWriter | None = None
        self._tokens = 0
        self._opened = ExitStack()

    def __enter__(self) -> Observer:
        with ExitStack() as opening:
            opening.enter_context(open_logs(self.run, self._rank, self._ranks))
            opening.enter_context(determinism(self.config.deterministic))
            if self._rank == 0:
                self._metrics = opening.enter_context(MetricsWriter(self.run, self.config))
                self._count_tokens()
            opening.enter_context(self._profiling)
            opening.enter_context(self._garbage)
            opening.callback(self._write_timeline)
            opening.enter_context(self._heartbeat)
            opening.enter_context(self._watchdog)
            self._opened = opening.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.__exit__(kind, error, trace)  # type: ignore[arg-type]

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The context of one step: its timeline, profile and garbage collection."""
        self.timeline.begin(step)
        with self._profiling.step(step):
            yield
        if self._garbage.due(step):
            with self.timeline.span("garbage"):
                self._garbage.collect()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a step's metrics and the total tokens so far on rank 0; does nothing on other ranks."""
        if self._metrics is not None:
            if TOKENS in metrics:
                self._tokens += int(metrics[TOKENS])
                metrics = {**metrics, TOTAL_TOKENS: self._tokens}
            self._metrics.write(step, metrics)
            if self._on_metrics is not None:
                self._on_metrics(step, dict(metrics))  # a copy, since the caller may change it

    def extend(self, last: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Adds metrics to `last`, the last step's line of metrics.jsonl, on rank 0."""
        if self._metrics is not None:
            self._metrics.extend(last, metrics)
            if self._on_metrics is not None:
                self._on_metrics(last["step"], {**last, **metrics})

    def samples_due(self, step: int) -> bool:
        """Whether a table of the completions that `step` trained on is sent to the trackers."""
        every = self.config.samples_every
        return every > 0 and (step == 1 or step % every == 0)

    def write_samples(self, step: int, name: str, samples: Table) -> None:
        """Writes a table to the trackers on rank 0, unless `observe.samples_every` is 0."""
        if self._metrics is not None and self.config.samples_every:
            self._metrics.write_table(step, name, samples)

    def for_terminal(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a written step that match `observe.terminal`, in its order.

        Without the validation's, which are printed when it ends.
        """
        metrics = {**metrics, TOTAL_TOKENS: self._tokens} if TOKENS in metrics else metrics
        names = [name for pattern in self.config.terminal for name in metrics if fnmatchcase(name, pattern)]
        return {name: metrics[name] for name in names if not name.startswith("validation/")}

    def rewind(self, step: int) -> None:
        """Drops the metrics after `step`, which the run writes again."""
        if self._metrics is not None:
            self._metrics.rewind(step)
            self._count_tokens()

    def _count_tokens(self) -> None:
        """Reads the total from the file, which a resumed or rewound run has truncated to the step it continues from."""
        lines = read_metrics(RunFolder(self.run).metrics, skip_bad=True)
        self._tokens = next((int(line[TOTAL_TOKENS]) for line in reversed(lines) if TOTAL_TOKENS in line), 0)

    def _write_timeline(self) -> None:
        if self.config.timeline_steps:
            path = timeline_path(self.run, self._rank, self._ranks)
            try:
                self.timeline.write(path)
            except OSError as error:  # must not replace the error that ended the run, such as a full disk
                path.unlink(missing_ok=True)
                log.warning("%s: cannot write the timeline (%s)", path, error.strerror)
