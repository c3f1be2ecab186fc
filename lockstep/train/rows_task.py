"""A run on a loader's rows: pretraining, fine-tuning, preferences and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lockstep.config import PretrainConfig
from lockstep.data import Row, RowLoader, StepRows, Tokenizer
from lockstep.model import Decoder, ModelConfig, TrainableModel, resolve_dtype
from lockstep.observe import (
    OnMetrics,
    RunFolder,
    Timeline,
    announce,
    in_short,
    memory_gib,
    peak_flops,
    start_line,
    training_flops,
)
from lockstep.parallel import World
from lockstep.progress import Progress
from lockstep.run.loop import run_steps
from lockstep.run.session import Session
from lockstep.run.stop import StopSignal
from lockstep.run.task import Metrics, Resumable, StepObserver
from lockstep.train.answers import Answers
from lockstep.train.faults import BadSteps, LossSpikes
from lockstep.train.objective import NextToken, Objective
from lockstep.train.trainer import Trainer


@dataclass
class RowsRun:
    """The parts of a run on rows, besides its settings."""

    tokenizer: Tokenizer
    model: TrainableModel
    loader: RowLoader
    held_out: StepRows | None = None
    """The rows for validation."""
    command: str = "pretrain"
    objective: Objective = field(default_factory=NextToken)
    answers: Answers | None = None
    """The model's answers before and after, for the report."""


def train_rows(
    config: PretrainConfig,
    world: World,
    parts: RowsRun,
    progress: Progress | None = None,
    on_metrics: OnMetrics | None = None,
) -> Path:
    """Makes the run's steps, from its last checkpoint if it resumes; returns the run's folder.

    Raises RunStopped if the run ends early, because of a signal or bad steps.
    """
    model, answers = parts.model, parts.answers
    trainer = Trainer(model, config.train, config.steps, world)
    with Session(config, trainer, parts.tokenizer, parts.command, progress, on_metrics) as session:
        parts.objective.prepare(trainer, parts.loader, parts.held_out)
        task = RowsTask(
            config, trainer, parts, BadSteps(config.faults, session.run.path, parts.tokenizer), session.stop
        )
        session.resume(task)
        _announce(config, parts, world, session.start)
        with session.running():
            if answers is not None and isinstance(model, Decoder) and session.start == 0:
                answers.write(0, model)
            run_steps(task, session)
            if config.steps == 0:
                session.save(task)
            if answers is not None and isinstance(model, Decoder) and session.worked and not session.stopped_by:
                answers.write(session.step, model)
        metrics = session.last_metrics
        return session.finish(
            task,
            f"{parts.command} {config.model}",
            lambda: {"loss": metrics.get("loss"), "validation_loss": metrics.get("validation/loss")},
        )


def _announce(config: PretrainConfig, parts: RowsRun, world: World, start: int) -> None:
    tokens = (config.steps - start) * config.tokens_per_step
    work = f"{in_short(tokens)} tokens to go, {in_short(config.tokens_per_step)} per step"
    line = start_line(config.model, parts.model.config, world.device, resolve_dtype(config.dtype), work, world.size)
    announce(f"{parts.command}: {line}")


class RowsTask:
    """Steps on a loader's rows."""

    def __init__(self, config: PretrainConfig, trainer: Trainer, parts: RowsRun, bad_steps: BadSteps, stop: StopSignal):
        self.config, self.trainer, self.bad_steps, self.stop = config, trainer, bad_steps, stop
        self.objective, self.loader, self.held_out = parts.objective, parts.loader, parts.held_out
        self.speed = Throughput(trainer.model.config, trainer.world, resolve_dtype(config.dtype))
        spikes = LossSpikes(config.faults)
        self.observers: list[StepObserver] = [spikes]
        self.resumables: Mapping[str, Resumable] = {"loader": parts.loader, "losses": spikes}

    def step(self, step: int) -> Metrics:
        """Updates the weights on the loader's next rows."""
        trainer, timeline = self.trainer, self.trainer.timeline
        with timeline.span("data"):
            batch = self.loader.next()
        metrics = self.objective.step(trainer, batch)
        self.bad_steps.check(step, trainer, batch)
        return metrics | self.speed.metrics(batch, timeline) | self.loader.counts | {"epoch": self.loader.epoch}

    def record(self, step: int) -> None:
        self.trainer.balance.write(RunFolder(Path(self.config.output)).expert_load, step)

    @property
    def ended(self) -> bool:
        return self.loader.ended

    def validates_after(self, step: int) -> bool:
        last = step == self.config.steps or self.ended
        return self.held_out is not None and step > 0 and (last or step % self.config.validation_every == 0)

    def validate(self, step: int) -> Metrics:
        """The objective's metrics on the held-out rows. Ranks share every micro-batch's forward."""
        assert self.held_out is not None
        with self.stop.interruptible(shared=True):
            return dict(self.objective.validate(self.trainer, self.held_out))

    def shown(self, metrics: Metrics) -> dict[str, float]:
        return {"loss": metrics["loss"], "tokens_per_s": metrics["tokens_per_second"]}


PHASES = ("data", "forward", "backward", "optimizer")


class Throughput:
    """Turns a step's rows and times into tokens per second, TFLOP/s and, if known, the share of the peak."""

    def __init__(self, config: ModelConfig, world: World, dtype: torch.dtype):
        self.config, self.world = config, world
        # Measured by one rank while the others wait for it.
        self.peak = peak_flops(world.device, dtype) * world.size if world.is_main else 1.0

    def metrics(self, batch: StepRows, timeline: Timeline) -> dict[str, float]:
        """Metrics of the current step over all ranks; memory and times are this rank's. Called by every rank."""
        seconds = timeline.elapsed()
        rows = [row for rows in batch.microbatches for row in rows]
        local = training_flops(self.config, [n for row in rows for n in document_lengths(row)])
        local -= training_flops(self.config, [n for row in rows for n in row.shared or ()])
        (flops,) = self.world.sum([local], ("data_replicate", "data_shard"))
        return {
            "tokens": batch.tokens,
            "tokens_per_second": batch.tokens / seconds,
            "tflops": flops / seconds / 1e12,
            **({"mfu": flops / seconds / self.peak} if self.peak else {}),
            "memory_gib": memory_gib(self.world.device),
            "data/padding": 1 - batch.tokens / batch.capacity,
            **{f"time/{phase}": timeline.seconds(phase) for phase in PHASES},
            "time/step": seconds,
        }


def document_lengths(row: Row) -> list[int]:
    """The complete lengths of the row's sequences, without the padding that may be the last one."""
    lengths = row.complete_lengths()
    return lengths if row.scored[-row.lengths[-1] :].any() else lengths[:-1]
