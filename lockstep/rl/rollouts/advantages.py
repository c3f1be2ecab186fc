"""Advantages of rollouts, by the run's algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, islice, pairwise

import torch
from torch import Tensor

from lockstep.config import Algorithm
from lockstep.rl.algorithms import (
    best_of_group,
    distillation_advantages,
    divergences,
    generalized_advantages,
    group_advantages,
    leave_one_out_advantages,
    rewards_to_go,
    value_returns,
    whitened,
)
from lockstep.rl.algorithms.own import AdvantageInputs, OwnAdvantages
from lockstep.rl.rollouts.records import Rollout, episodes_of


def assign_advantages(rollouts: Sequence[Rollout], algorithm: Algorithm, own: OwnAdvantages | None = None) -> None:
    """Assigns advantages by `own` if it is given, else by `algorithm.advantage`; the rollouts are ordered by group.

    Rewards, and `reference_logprobs`, `teacher_logprobs` and `values` if the algorithm uses them, must have been
    assigned.
    """
    if algorithm.advantage == "teacher":
        _assign(rollouts, [distillation_advantages(r.logprobs, r.scores.teacher_logprobs) for r in rollouts])
        return
    charges = _charges(rollouts, algorithm)
    episodes = episodes_of(rollouts)
    of_rows = iter(charges)
    charges_of_episodes = [[charge for _ in rows for charge in next(of_rows)] for rows in episodes]
    if algorithm.advantage == "gae":
        estimates = [_gae(rows, charges, algorithm) for rows, charges in zip(episodes, charges_of_episodes)]
        _assign_to_rows(episodes, whitened(estimates) if algorithm.normalize_advantages else estimates)
        return
    if algorithm.advantage == "batch":
        to_go = [rewards_to_go(rows[0].scores.reward, charges) for rows, charges in zip(episodes, charges_of_episodes)]
        _assign_to_rows(episodes, whitened(to_go, algorithm.normalize_advantages))
        return
    # One group at a time: if some rewards failed, groups differ in size.
    groups = [list(members) for _, members in groupby(episodes, key=lambda rows: rows[0].group)]
    totals = (rows[0].scores.reward - math.fsum(charges) for rows, charges in zip(episodes, charges_of_episodes))
    rewards = [torch.tensor([next(totals) for _ in group], dtype=torch.float64) for group in groups]
    if own is not None:
        _assign_to_groups(groups, own(advantage_inputs(groups, rewards)))
        return
    _assign_to_groups(groups, [_relative(of_group[None], algorithm)[0].tolist() for of_group in rewards])
    if algorithm.advantage == "group_batch":
        of_tokens = [[a for rollout in rows for a in rollout.advantages_of_tokens()] for rows in episodes]
        _assign_to_rows(episodes, whitened(of_tokens, algorithm.normalize_advantages))


def _gae(rows: Sequence[Rollout], charges: Sequence[float], algorithm: Algorithm) -> list[float]:
    """Advantages from the values: an episode's reward counts at its last token, each charge at its token."""
    values = [value for rollout in rows for value in rollout.scores.values]
    rewards = [-charge for charge in charges]
    rewards[-1] += rows[0].scores.reward
    advantages = generalized_advantages(rewards, values, algorithm.gae_gamma, algorithm.gae_lambda)
    returns = iter(value_returns(advantages, values))
    for rollout in rows:
        rollout.scores.returns = list(islice(returns, len(rollout.scores.values)))
    return advantages


def _relative(rewards: Tensor, algorithm: Algorithm) -> Tensor:
    if algorithm.advantage == "leave_one_out":
        return leave_one_out_advantages(rewards)
    if algorithm.advantage == "best":
        return best_of_group(rewards)
    return group_advantages(rewards, algorithm.advantage == "group" and algorithm.normalize_advantages)


def _charges(rollouts: Sequence[Rollout], algorithm: Algorithm) -> list[list[float]]:
    """The KL penalty that is subtracted from the reward at each token."""
    if algorithm.kl_in == "loss" or algorithm.kl_coefficient == 0:
        return [[0.0] * r.num_sampled for r in rollouts]
    policy = torch.tensor([x for r in rollouts for x in r.logprobs])
    reference = torch.tensor([x for r in rollouts for x in r.scores.reference_logprobs])
    charged = divergences(policy, reference, algorithm.kl_estimator).double() * algorithm.kl_coefficient
    return [part.tolist() for part in charged.split([r.num_sampled for r in rollouts])]


def advantage_inputs(groups: Sequence[Sequence[Sequence[Rollout]]], rewards: Sequence[Tensor]) -> AdvantageInputs:
    """What a user's advantages are a function of. groups: the rows of each episode of each group."""

    def of_tokens(column: Callable[[Rollout], list[float]]) -> list[list[Tensor]]:
        return [[torch.tensor([x for rollout in rows for x in column(rollout)]) for rows in group] for group in groups]

    def if_scored(column: Callable[[Rollout], list[float]]) -> list[list[Tensor]] | None:
        return of_tokens(column) if any(column(r) for group in groups for rows in group for r in rows) else None

    return AdvantageInputs(
        rewards=rewards,
        lengths=[[sum(rollout.num_sampled for rollout in rows) for rows in group] for group in groups],
        log_probs=of_tokens(lambda rollout: rollout.logprobs),
        reference_log_probs=if_scored(lambda rollout: rollout.scores.reference_logprobs),
        teacher_log_probs=if_scored(lambda rollout: rollout.scores.teacher_logprobs),
    )


def _assign_to_groups(
    groups: Sequence[Sequence[Sequence[Rollout]]], advantages: Sequence[Sequence[float | list[float]]]
) -> None:
    """For each episode of each group, one advantage or one for each of its tokens."""
    for group, of_group in zip(groups, advantages):
        for rows, of_episode in zip(group, of_group):
            if isinstance(of_episode, list):
                _assign_to_rows([rows], [of_episode])
                continue
            for rollout in rows:
                rollout.scores.advantage = of_episode


def _assign_to_rows(episodes: Sequence[Sequence[Rollout]], of_tokens: Sequence[list[float]]) -> None:
    """Splits each episode's advantages among its rows."""
    for rows, advantages in zip(episodes, of_tokens):
        ends = [0, *accumulate(rollout.num_sampled for rollout in rows)]
        _assign(rows, [advantages[start:end] for start, end in pairwise(ends)])
        for rollout in rows:
            rollout.scores.advantage = _mean(advantages)


def _assign(rollouts: Sequence[Rollout], of_tokens: Sequence[list[float]]) -> None:
    for rollout, advantages in zip(rollouts, of_tokens):
        rollout.scores.token_advantages = advantages
        rollout.scores.advantage = _mean(advantages)


def _mean(advantages: Sequence[float]) -> float:
    return math.fsum(advantages) / max(len(advantages), 1)
