"""What a training run optimizes: the protocol of objectives, and next-token prediction."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from lockstep.data import RowLoader, StepRows
from lockstep.model import ScoringModel
from lockstep.parallel import World
from lockstep.train.context import shard_row
from lockstep.train.packing import PackedRow, pack_rows, target_log_prob_sum
from lockstep.train.trainer import Trainer


@runtime_checkable
class Objective(Protocol):
    """What a run optimizes on a loader's rows."""

    def prepare(self, trainer: Trainer, loader: RowLoader, held_out: StepRows | None) -> None:
        """Called before the first step and before a resumed run loads its checkpoint: the model is the initial one."""
        ...

    def step(self, trainer: Trainer, batch: StepRows) -> dict[str, float]:
        """One step of the trainer; returns its metrics and the objective's own."""
        ...

    def validate(self, trainer: Trainer, held_out: StepRows) -> dict[str, float]:
        """`validation/loss` and other metrics on rows that are not trained on."""
        ...


class NextToken:
    """Cross-entropy per target token, in nats."""

    def prepare(self, trainer: Trainer, loader: RowLoader, held_out: StepRows | None) -> None:
        pass

    def step(self, trainer: Trainer, batch: StepRows) -> dict[str, float]:
        with trainer.timeline.span("data"):
            microbatches = packed(batch, trainer.world)
        return trainer.step(microbatches, NextTokenLoss(batch.targets))

    def validate(self, trainer: Trainer, held_out: StepRows) -> dict[str, float]:
        return {"validation/loss": trainer.evaluate(packed(held_out, trainer.world), NextTokenLoss(held_out.targets))}


def packed(batch: StepRows, world: World) -> list[PackedRow]:
    """This rank's micro-batches as the model takes them, with this rank's part of each sequence."""
    return [shard_row(pack_rows(rows, world.device), world) for rows in batch.microbatches]


class NextTokenLoss:
    """A micro-batch's share of the mean cross-entropy over a step's targets."""

    def __init__(self, targets: int):
        self.targets = max(targets, 1)

    def __call__(self, model: ScoringModel, row: PackedRow) -> Tensor:
        return target_log_prob_sum(model, row, -1.0 / self.targets)
