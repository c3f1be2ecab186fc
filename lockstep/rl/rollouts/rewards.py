"""Rewards of rollouts: graded by the environment, with a penalty for completions close to the length limit."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config import RewardConfig
from lockstep.observe import log
from lockstep.rl.algorithms import overlong_penalty
from lockstep.rl.conversations.grading import grade_conversations
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.environments.protocol import Environment
from lockstep.rl.grading import Grader, InProcessGrader, Outcome, failures, refuse_none, totals
from lockstep.rl.rollouts.records import OVERLONG, Rollout, episodes_of


def assign_rewards(
    rollouts: Sequence[Rollout],
    environment: Environment,
    config: RewardConfig | None = None,
    grader: Grader | None = None,
) -> list[Outcome]:
    """Grades every rollout, in this process unless a `grader` is passed; marks those whose reward failed.

    The rows of a conversation get its rewards: those that `converse` returned, else the group's `grade`, else `reward`
    of the last reply. One without a reply from the model never counts. Returns the outcomes of the rewards, for
    `refuse_too_many`. Raises UserError as `totals` does.
    """
    config = config or RewardConfig()
    episodes = episodes_of(rollouts)
    jobs = [(rows[-1].example, rows[-1].completion) for rows in episodes]
    grader = grader or InProcessGrader(environment, config)
    if isinstance(environment, ConversationEnvironment):
        outcomes = grade_conversations(environment, episodes, grader)
    else:
        outcomes = grader(jobs)
    outcomes = [refuse_none(outcome, environment) for outcome in outcomes]
    if problem := failures(outcomes):
        log.warning("%s", problem)
    for rows, graded in zip(episodes, totals(environment, jobs, outcomes)):
        for rollout in rows:
            scores = rollout.scores
            scores.rewards, scores.reward, scores.failure = dict(graded.by_name), graded.total, graded.failure
            scores.counts = not graded.failure or (config.on_failure == "zero" and bool(rollout.token_ids))
    return outcomes


def charge_overlong(rollouts: Sequence[Rollout], limit: int, share: float) -> None:
    """Adds the penalty of completions that use the last `share` of `limit` tokens, as a reward named `overlong`.

    For a conversation it is that of its longest reply.
    """
    for rows in episodes_of(rollouts) if share > 0 else ():
        penalty = overlong_penalty(max(rollout.longest_reply() for rollout in rows), limit, share)
        for rollout in rows:
            rollout.scores.rewards[OVERLONG] = penalty
            rollout.scores.reward += penalty
