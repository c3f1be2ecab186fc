"""Scorers of rollouts, and the forward passes that they share: over micro-batches, divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from lockstep.rl.rollouts.packing import microbatches
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.replicas import Replicas
from lockstep.train.packing import PackedRow


class Scorer(Protocol):
    """Fills a column of the rollouts' scores."""

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """All ranks call it with the same rollouts, ordered by group, and get the scores of all of them."""


@dataclass(frozen=True)
class ForwardPasses:
    """Forward passes of a model over rollouts."""

    tokens_per_microbatch: int
    """At most; a longer rollout is a micro-batch alone."""
    replicas: Replicas | None = None
    """What whole groups are divided among, so that a group's prompt is computed once; None: all are computed here."""
    moved: Callable[[], None] = field(default=lambda: None)
    """Called after each micro-batch."""

    def per_token(
        self, rollouts: Sequence[Rollout], device: str | torch.device, score: Callable[[PackedRow], Tensor]
    ) -> list[list[float]]:
        """One number for each sampled token of each rollout, on every rank.

        score: the numbers of a row's targets, `[targets]`. A model's are bitwise those of each rollout alone.
        """
        groups = [list(members) for _, members in groupby(rollouts, key=lambda rollout: rollout.group)]

        def of_groups(numbers: list[int]) -> list[list[list[float]]]:
            share = [rollout for number in numbers for rollout in groups[number]]
            scores = iter(self._on_this_rank(share, device, score))
            return [[next(scores) for _ in groups[number]] for number in numbers]

        if self.replicas is None:
            scored = of_groups(list(range(len(groups))))
        else:
            scored = self.replicas.spread(groups, of_groups)
        return [scores for group in scored for scores in group]

    @torch.no_grad()
    def _on_this_rank(
        self, rollouts: Sequence[Rollout], device: str | torch.device, score: Callable[[PackedRow], Tensor]
    ) -> list[list[float]]:
        scores: list[list[float]] = [[] for _ in rollouts]
        for plan in microbatches(rollouts, self.tokens_per_microbatch):
            of_row = score(plan.packed(device)).split([rollout.num_sampled for rollout in plan.rollouts])
            for number, of_rollout in zip(plan.numbers, of_row):
                scores[number] = of_rollout.tolist()
            self.moved()
        return scores
