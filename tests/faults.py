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


def no_sum_over_data_ranks() -> None:
    """Each rank keeps its own gradients instead of their sum."""
    from lockstep.parallel.exchange import ExchangedSum

    def own(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, *rest: Any, **named: Any) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

    ExchangedSum.__call__ = own  # type: ignore[method-assign]


def no_sum_over_tensor_ranks() -> None:
    """Each rank of a tensor group keeps its own part of the gradient that the head and column products give back."""
    from lockstep.parallel import operators
    from lockstep.parallel.exchange import local_rows

    exact = operators.exchanged

    def exchanged(x: Any, group: Any, forward: Any, backward: Any) -> Any:
        return exact(x, group, forward, local_rows if forward is operators.gather_rows else backward)

    operators.exchanged = exchanged


def swapped_shard() -> None:
    """A rank's rows of one weight are those of another place."""
    _damage_fresh_weights(lambda own: own.copy_(torch.cat(own.chunk(2)[::-1])))


def flipped_bit() -> None:
    """The lowest bit of one element that bfloat16 keeps."""
    _damage_fresh_weights(lambda own: _flip(own, 1 << 16))


def stale_weight() -> None:
    """One parameter is never updated."""
    from lockstep.train import optimizer

    exact = optimizer.adamw_update

    def update(masters: list[Tensor], weights: list[Tensor], *rest: Any) -> None:
        first = masters[0].detach().clone()
        exact([first, *masters[1:]], [first, *weights[1:]], *rest)

    optimizer.adamw_update = update


def repeated_batch() -> None:
    """A rank takes its first micro-batch in place of every other."""
    from lockstep.train import Trainer

    exact = Trainer.step

    def step(self: Any, microbatches: Any, loss_of: Any) -> dict[str, float]:
        held = list(microbatches)
        return exact(self, [held[0]] * len(held), loss_of)

    Trainer.step = step  # type: ignore[method-assign]


def rows_as_they_arrive() -> None:
    """Rows that other ranks sent meet their experts in the order in which they came, which is another one's."""
    from lockstep.parallel import experts

    exact = experts._by_expert
    experts._by_expert = lambda counts: exact(counts).sort().values


def rows_of_an_expert_backwards() -> None:
    """The rows of one expert lie in another order than in one process: only sums over them know of it."""
    from lockstep.parallel import experts

    exact = experts._by_expert

    def backwards(counts: Tensor) -> Tensor:
        return torch.cat([rows.flip(0) for rows in exact(counts).split(counts.sum(0).tolist())])

    experts._by_expert = backwards


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
        no_sum_over_data_ranks,
        no_sum_over_tensor_ranks,
        swapped_shard,
        flipped_bit,
        stale_weight,
        repeated_batch,
        rows_as_they_arrive,
        rows_of_an_expert_backwards,
        another_expert_on_the_first_rank,
    )
}


def _damage_fresh_weights(damage: Callable[[Tensor], Any]) -> None:
    from tests.parallel import training

    exact = training.initialize

    def initialize(model: Any, seed: int) -> None:
        exact(model, seed)
        for name, parameter in model.named_parameters():
            if name == DAMAGED:
                damage(_own(parameter.data))

    training.initialize = initialize


def _own(tensor: Tensor) -> Tensor:
    from lockstep.model.shard import local_values

    return local_values(tensor)


def _flip(tensor: Tensor, bit: int) -> None:
    """In float32 `tensor`'s first element, in place; in the rounded one where it is narrower."""
    wide = tensor.flatten()[:1].float()
    wide.view(torch.int32).bitwise_xor_(bit)
    tensor.view(-1)[:1] = wide.to(tensor.dtype)
