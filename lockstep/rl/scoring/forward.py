"""Forward passes over a step's rollouts, divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from lockstep.config import RLConfig
from lockstep.rl.rollouts.microbatches import score_sampled
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.replicas import Replicas
from lockstep.train.packing import PackedRow


def score_groups(
    rollouts: Sequence[Rollout],
    config: RLConfig,
    device: str | torch.device,
    score: Callable[[PackedRow], Tensor],
    replicas: Replicas | None = None,
    moved: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """One number for each sampled token of each rollout, on every rank; `score` as for `score_sampled`.

    Whole groups are divided among `replicas`, so that a group's prompt is computed once; None: all are scored here.
    moved: called after each micro-batch.
    """
    groups = [list(members) for _, members in groupby(rollouts, key=lambda rollout: rollout.group)]

    def of_groups(numbers: list[int]) -> list[list[list[float]]]:
        own = [rollout for number in numbers for rollout in groups[number]]
        scores = iter(score_sampled(own, config.train.tokens_per_microbatch, device, score, moved))
        return [[next(scores) for _ in groups[number]] for number in numbers]

    scored = replicas.spread(groups, of_groups) if replicas else of_groups(list(range(len(groups))))
    return [scores for group in scored for scores in group]
