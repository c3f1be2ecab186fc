"""How the ranks that train divide prompts for sampling, and exchange rollouts so that every rank has all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lockstep.parallel import World
from lockstep.parallel.messages import from_all
from lockstep.rl.environments.protocol import Example
from lockstep.rl.grading.calling import Outcome
from lockstep.rl.rollouts.plain import plain_rollouts, rollouts_of
from lockstep.rl.rollouts.records import Rollout

PATIENCE = timedelta(days=7)
"""How long ranks that have finished sampling wait for one that has not. If a rank dies, they notice at once."""

Value = TypeVar("Value")


class Replicas:
    """The generators of a run: one for each group of tensor-parallel ranks. In one process there is one."""

    def __init__(self, world: World, separate: bool = False):
        """separate: whether generators are other processes, with which only rank 0 communicates."""
        self.world, self.separate = world, separate
        self.ranks = world.tensor_ranks
        self.count = world.size // len(self.ranks)
        # Ranks of a tensor group are adjacent.
        self.index = world.rank // len(self.ranks)
        self.leads = world.rank == (0 if separate else self.ranks[0])
        """Whether this rank reports its generator's rollouts; the generator's ranks all sample the same."""
        self._group = None if world.mesh is None else dist.new_group(backend="gloo", timeout=PATIENCE)

    def share_of(self, examples: Sequence[Example], wanted: int) -> tuple[dict[int, Example], int | None]:
        """The examples that this rank requests, by index: every `count`-th, or with separate generators all on rank 0.

        And how many groups of these are enough, if fewer are `wanted` than there are examples; None: all. A rank none
        of whose groups is wanted requests nothing.
        """
        numbers = self._every_nth(examples)
        if self.separate:
            numbers = list(range(len(examples))) if self.leads else []
        first = None
        if wanted < len(examples):
            first = sum(number < wanted for number in numbers)
            numbers = numbers if first else []
        return {number: examples[number] for number in numbers}, first

    def _every_nth(self, examples: Sequence[Any]) -> list[int]:
        return list(range(self.index, len(examples), self.count))

    def gather_rollouts(
        self, examples: Sequence[Example], rollouts: list[Rollout], outcomes: Sequence[Outcome] = ()
    ) -> tuple[list[Rollout], list[Outcome]]:
        """All generators' rollouts of `examples`, in their order, and the outcomes of the rewards; on every rank."""
        if self._group is None:
            return rollouts, list(outcomes)
        share = [plain_rollouts(rollouts), [dataclasses.asdict(outcome) for outcome in outcomes]]
        shares = [each for each in self.gather(share if self.leads else None) if each is not None]
        gathered = [rollout for rollouts, _ in shares for rollout in rollouts_of(rollouts, examples)]
        return (
            sorted(gathered, key=lambda rollout: rollout.group),
            [Outcome(**outcome) for _, outcomes in shares for outcome in outcomes],
        )

    def spread(self, items: Sequence[Any], work: Callable[[list[int]], list[Value]]) -> list[Value]:
        """`work`'s value (JSON-able) for each of `items`, on every rank; `work` gets the indices of a rank's share."""
        if self.count == 1:
            return work(list(range(len(items))))
        values = work(self._every_nth(items))
        gathered: list[Any] = [None] * len(items)
        for replica, share in enumerate(self.gather(values)[:: len(self.ranks)]):
            gathered[replica :: self.count] = share
        return gathered

    def metrics(self) -> dict[str, int]:
        """The number of ranks, if there are several."""
        return {"ranks": self.world.size} if self.world.size > 1 else {}

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON-able) on every rank, however long the slowest takes."""
        return [value] if self._group is None else from_all(value, self._group)
