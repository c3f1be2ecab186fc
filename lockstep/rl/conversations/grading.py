"""Rewards of conversations: the result of `converse`, else of `grade` for the group, else of `reward`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from lockstep.rl.conversations.protocol import ConversationEnvironment, Episode
from lockstep.rl.conversations.runner import Group, Outcomes, grade_groups
from lockstep.rl.conversations.worker_runner import run_tasks, worker_task
from lockstep.rl.environments.protocol import Environment
from lockstep.rl.grading.calling import INVALID, Grader, Outcome, call_problem, failure
from lockstep.rl.grading.exchange import GroupGraded
from lockstep.rl.grading.pool import GraderPool
from lockstep.rl.rollouts.records import Conversation, Rollout


def grade_conversations(
    environment: ConversationEnvironment, episodes: Sequence[Sequence[Rollout]], grader: Grader
) -> list[Outcome]:
    """The outcome of each episode's rewards, in order. Episodes of a group are adjacent."""
    conversations = [_conversation(rows[0]) for rows in episodes]
    outcomes: Outcomes = [conversation.outcome for conversation in conversations]
    has_grade = type(environment).grade is not ConversationEnvironment.grade
    if has_grade:
        outcomes = _grade_groups(environment, episodes, grader)
    ungraded = [number for number, outcome in enumerate(outcomes) if outcome is None]
    if ungraded and not _has_reward(environment):
        problem = f"returned no rewards{', nor did `grade`' if has_grade else ''}, and there is no `reward`,"
        for number in ungraded:
            message = call_problem(environment, episodes[number][-1].example, problem, "converse")
            message += "; return a number from `converse`, or write `grade` or `reward`"
            outcomes[number] = failure(INVALID, message)
    elif ungraded:
        jobs = [(episodes[number][-1].example, _answer(environment, episodes[number])) for number in ungraded]
        for number, outcome in zip(ungraded, grader(jobs)):
            outcomes[number] = outcome
    return _with_shared_names([outcome for outcome in outcomes if outcome is not None], conversations)


def _has_reward(environment: ConversationEnvironment) -> bool:
    return bool(environment.rewards) or type(environment).reward is not Environment.reward


def _conversation(rollout: Rollout) -> Conversation:
    assert rollout.conversation is not None, "rollouts of a conversation environment are conversations"
    return rollout.conversation


def _answer(environment: ConversationEnvironment, rows: Sequence[Rollout]) -> str:
    return rows[-1].completion if environment.marks_reasoning else _episode(rows).answer


def _episode(rows: Sequence[Rollout]) -> Episode:
    conversation = _conversation(rows[0])
    rewards = conversation.outcome.rewards if conversation.outcome else None
    if rewards is not None and rewards.keys() == {"reward"}:
        return Episode(conversation.messages, rewards["reward"], conversation.over)
    return Episode(conversation.messages, rewards, conversation.over)


def _grade_groups(
    environment: ConversationEnvironment, episodes: Sequence[Sequence[Rollout]], grader: Grader
) -> Outcomes:
    """Calls `grade` for each group that has an episode without rewards; failed episodes are not passed to it."""
    outcomes: Outcomes = [_conversation(rows[0]).outcome for rows in episodes]
    groups = [
        list(numbers) for _, numbers in groupby(range(len(episodes)), key=lambda number: episodes[number][0].group)
    ]
    without_failed = [[n for n in group if (known := outcomes[n]) is None or not known.cause] for group in groups]
    ungraded = [group for group in without_failed if any(outcomes[number] is None for number in group)]

    arguments: list[Group] = [
        (episodes[group[0]][0].example, [_episode(episodes[number]) for number in group]) for group in ungraded
    ]
    if isinstance(grader, GraderPool):
        outcomes_by_group = _grade_in_workers(grader, arguments)
    else:
        outcomes_by_group = grade_groups(environment, arguments, grader.config)
    for group, group_outcomes in zip(ungraded, outcomes_by_group):
        for number, outcome in zip(group, group_outcomes):
            outcomes[number] = outcomes[number] or outcome
    return outcomes


def _grade_in_workers(workers: GraderPool, groups: Sequence[Group]) -> list[Outcomes]:
    """If a group's `grade` exceeds a limit, the whole group fails."""
    seeds = [zlib.crc32("".join(episode.answer for episode in episodes).encode()) for _, episodes in groups]
    tasks = [worker_task(example, seed, episodes) for seed, (example, episodes) in zip(seeds, groups)]
    return [
        result.outcomes if isinstance(result, GroupGraded) else [result.outcome] * len(episodes)
        for result, (_, episodes) in zip(run_tasks(tasks, workers), groups)
    ]


def _with_shared_names(outcomes: list[Outcome], conversations: Sequence[Conversation]) -> list[Outcome]:
    """Uses the single number of a conversation that ended at its limit for every name in the others' rewards."""
    named = (o.rewards for o, conversation in zip(outcomes, conversations) if not o.cause and not conversation.over)
    names = next(named, {})
    return [
        replace(outcome, rewards=dict.fromkeys(names, outcome.rewards["reward"]))
        if conversation.over and names and outcome.rewards.keys() == {"reward"} != names.keys()
        else outcome
        for outcome, conversation in zip(outcomes, conversations)
    ]
