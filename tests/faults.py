"""Faults that a test plants in the processes of its harness, to see that what compares their results finds them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VARIABLE = "LOCKSTEP_TEST_FAULT"
"""Names the fault that `tests.parallel.launch` plants in every process that it starts."""
DAMAGED = "layers.1.mlp.up_proj.weight"
"""The parameter that is damaged where a fault damages one."""


def half_the_learning_rate() -> None:
    from lockstep.train import trainer

    exact = trainer.make_schedule

    def make(*arguments: Any) -> Callable[[int], float]:
        schedule = exact(*arguments)
        return lambda step: schedule(step) / 2

    trainer.make_schedule = make


def moments_left_behind() -> None:
    """A resumed optimizer begins with fresh moments."""
    _after_resuming(lambda optimizer: [_zero(t) for n, t in optimizer.state_tensors().items() if n.startswith("exp")])


def resumed_with_a_swapped_shard() -> None:
    _after_resuming(lambda optimizer: _swap(optimizer.masters[DAMAGED]))


def resumed_with_a_flipped_bit() -> None:
    """The lowest bit of one element of a moment."""
    _after_resuming(lambda optimizer: _flip(_own(optimizer.state[DAMAGED]["exp_avg_sq"]), 1))


def resumed_with_stale_weights() -> None:
    """The masters are the checkpoint's, but the weights of the forward pass are not."""
    from lockstep.train import MasterOptimizer

    exact = MasterOptimizer.load_state_tensors

    def load(self: Any, tensors: dict[str, Tensor]) -> None:
        before = {name: _own(p).detach().clone() for name, p in self.parameters.items()}
        exact(self, tensors)
        for name, parameter in self.parameters.items():
            _own(parameter.data).copy_(before[name])

    MasterOptimizer.load_state_tensors = load  # type: ignore[method-assign]


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


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        half_the_learning_rate,
        another_expert_on_the_first_rank,
        moments_left_behind,
        resumed_with_a_swapped_shard,
        resumed_with_a_flipped_bit,
        resumed_with_stale_weights,
    )
}


def _after_resuming(damage: Callable[[Any], Any]) -> None:
    from lockstep.train import MasterOptimizer

    exact = MasterOptimizer.load_state_tensors

    def load(self: Any, tensors: dict[str, Tensor]) -> None:
        exact(self, tensors)
        with torch.no_grad():
            damage(self)

    MasterOptimizer.load_state_tensors = load  # type: ignore[method-assign]


def _own(tensor: Tensor) -> Tensor:
    from lockstep.model.shard import local_values

    return local_values(tensor)


def _zero(tensor: Tensor) -> None:
    _own(tensor).zero_()


def _swap(tensor: Tensor) -> None:
    own = _own(tensor)
    own.copy_(torch.cat(own.chunk(2)[::-1]))


def _flip(tensor: Tensor, bit: int) -> None:
    """In float32 `tensor`'s first element, in place; in the rounded one where it is narrower."""
    wide = tensor.flatten()[:1].float()
    wide.view(torch.int32).bitwise_xor_(bit)
    tensor.view(-1)[:1] = wide.to(tensor.dtype)
