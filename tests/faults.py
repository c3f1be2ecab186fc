"""Faults that a test plants in the processes of its harness, to see that what compares their results finds them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

VARIABLE = "LOCKSTEP_TEST_FAULT"
"""Names the fault that `tests.parallel.launch` plants in every process that it starts."""


def another_expert_on_the_first_rank() -> None:
    """The first rank's mixtures choose the expert that is liked least as their last, in training alone."""
    from lockstep.ops import routing
    from lockstep.train import Trainer

    exact, step, training = routing._choose, Trainer.step, [False]

    def choose(logits: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = exact(logits, *settings)
        if training[0]:
            chosen[:, -1] = logits.argmin(-1)
        return weights, chosen

    def train(self: Any, *arguments: Any) -> dict[str, float]:
        training[0] = True
        return step(self, *arguments)

    if os.environ["RANK"] == "0":
        routing._choose = choose  # type: ignore[assignment]
        Trainer.step = train  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {"another_expert_on_the_first_rank": another_expert_on_the_first_rank}
