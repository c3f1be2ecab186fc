"""Statistics of graded completions of held-out examples: for a run's validation and for `lockstep eval`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lockstep.errors import UserError
from lockstep.rl.environments.protocol import Environment
from lockstep.rl.rollouts.estimates import Estimate, estimate, pass_at_k
from lockstep.rl.rollouts.records import Rollout, Scores, episodes_of


@dataclass(frozen=True)
class EvalMetrics:
    """Means over prompts; a conversation is represented by its last reply."""

    prompts: int
    """Prompts with a completion that counts."""
    completions: int
    """All completions, including those that do not count."""
    right: list[tuple[int, int]]
    """For each prompt by index: completions that are right, and those that count. Empty if the environment has no
    notion of right answers."""
    pass_at: dict[int, Estimate]
    """pass@k by k, over the prompts with at least k completions that count; empty if `right` is."""
    reward: Estimate | None
    """Of the weighted total; None if no completion counts."""
    rewards: dict[str, Estimate]
    """By name, over the completions whose rewards did not fail."""
    failed: dict[str, int]
    """Completions whose reward failed, by cause."""
    truncated: float
    """Fraction of completions cut off at the limit."""
    tokens_mean: float
    """Sampled tokens per completion."""


def eval_metrics(rollouts: Sequence[Rollout], environment: Environment, pass_at: Sequence[int] = (1,)) -> EvalMetrics:
    """The statistics of graded rollouts, which are ordered by group.

    A completion whose reward failed counts as a wrong answer if failures are zeros; otherwise it does not count.
    """
    episodes = episodes_of(rollouts)
    prompts = [list(group) for _, group in groupby((rows[-1] for rows in episodes), key=lambda rollout: rollout.group)]
    counting = [[r for r in group if r.scores.counts] for group in prompts]
    graded = [[r.scores.rewards for r in group if not r.scores.failure] for group in prompts]
    graded = [group for group in graded if group]
    names = graded[0][0] if graded else {}
    if other := next((rewards for group in graded for rewards in group if rewards.keys() != names.keys()), None):
        raise UserError(
            f"the rewards of {type(environment).__name__} are {', '.join(names)} for one example, but "
            f"{', '.join(other)} for another; give every example the same names"
        )
    from_environment = (r.scores.environment_rewards() for group in counting for r in group)
    knows = any(environment.knows_correct(rewards) for rewards in from_environment if rewards)
    right = [(sum(_is_right(r.scores, environment) for r in group), len(group)) for group in counting]
    # The same prompts for every k.
    whole = [(correct, count) for correct, count in right if count >= max(pass_at, default=1)]
    enough = {k: [pass_at_k(count, correct, k) for correct, count in whole] for k in pass_at}
    totals = [[r.scores.reward for r in group] for group in counting if group]
    last = [rows[-1] for rows in episodes]
    return EvalMetrics(
        prompts=len(totals),
        completions=len(last),
        right=right if knows else [],
        pass_at={k: estimate([[value] for value in values]) for k, values in enough.items() if values and knows},
        reward=estimate(totals) if totals else None,
        rewards={name: estimate([[rewards[name] for rewards in group] for group in graded]) for name in names},
        failed=dict(sorted(Counter(r.scores.failure for r in last if r.scores.failure).items())),
        truncated=sum(r.finish_reason == "length" for r in last) / max(1, len(last)),
        tokens_mean=sum(r.num_sampled for rows in episodes for r in rows) / max(1, len(last)),
    )


def _is_right(scores: Scores, environment: Environment) -> bool:
    return not scores.failure and environment.is_correct(scores.environment_rewards())
