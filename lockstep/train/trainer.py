"""One optimizer step: micro-batches forward and backward, then clip and update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor

from lockstep.config import TrainConfig
from lockstep.model import Decoder
from lockstep.train.optimizer import MasterAdamW, learning_rate_at

MicroBatch = TypeVar("MicroBatch")


class Trainer:
    """The model, its optimizer and the number of steps taken."""

    def __init__(self, model: Decoder, config: TrainConfig, total_steps: int):
        self.model = model
        self.config = config
        self.total_steps = total_steps
        self.optimizer = MasterAdamW(model, config)
        self.updates = 0

    def step(
        self, microbatches: Iterable[MicroBatch], loss_of: Callable[[Decoder, MicroBatch], Tensor]
    ) -> dict[str, float]:
        """Accumulates the gradient of the summed losses, then updates the weights once.

        `loss_of` returns a micro-batch's share of the step's loss: a sum whose weights add up to 1 over the whole
        step, so that how it was cut into micro-batches does not matter.
        """
        started = time.perf_counter()
        loss = 0.0
        for microbatch in microbatches:
            share = loss_of(self.model, microbatch)
            share.backward()
            loss += share.item()
        learning_rate = learning_rate_at(self.updates, self.total_steps, self.config)
        grad_norm = self.optimizer.step(learning_rate)
        self.updates += 1
        return {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "time/train": time.perf_counter() - started,
        }
