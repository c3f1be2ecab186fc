"""Rewards of conversations: what `converse` returned, else what `grade` returns for the group, else `reward`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from lockstep.config import RewardConfig
from lockstep.rl.conversations.exchange import Graded
from lockstep.rl.conversations.protocol import ConversationEnvironment, Episode
from lockstep.rl.conversations.runner import Outcomes, Pulse, graded
from lockstep.rl.conversations.worker_runner import hosted, task_of
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading.calling import INVALID, Grader, Outcome, about, event_loop, failure
from lockstep.rl.grading.pool import Workers
from lockstep.rl.rollouts.records import Conversation, Rollout

Group = tuple[Example, list[Episode]]
"""What `grade` is called with."""


def grade_conversations(
    environment: ConversationEnvironment,
    episodes: Sequence[Sequence[Rollout]],
    config: RewardConfig,
    grader: Grader,
) -> list[Outcome]:
    """The outcome of each episode's rewards, in order; `reward` runs in `grader`. Episodes of a group are adjacent."""
    held = [_conversation(rows[0]) for rows in episodes]
    outcomes: Outcomes = [conversation.outcome for conversation in held]
    if type(environment).grade is not ConversationEnvironment.grade:
        outcomes = _grade_groups(environment, episodes, config, grader)
    alone = [number for number, outcome in enumerate(outcomes) if outcome is None]
    if alone and not _has_reward(environment):
        graded_too = type(environment).grade is not ConversationEnvironment.grade
        problem = f"returned no rewards{', nor did `grade`' if graded_too else ''}, and there is no `reward`,"
        for number in alone:
            said = about(environment, episodes[number][-1].example, problem, "converse")
            said += "; return a number from `converse`, or write `grade` or `reward`"
            outcomes[number] = failure(INVALID, said)
    elif alone:
        jobs = [(episodes[number][-1].example, _answer(environment, episodes[number])) for number in alone]
        for number, outcome in zip(alone, grader(jobs)):
            outcomes[number] = outcome
    graded = [outcome for outcome in outcomes if outcome is not None]
    return _with_names_of_others(graded, held)


def _has_reward(environment: ConversationEnvironment) -> bool:
    return bool(environment.rewards) or type(environment).reward is not Environment.reward


def _conversation(rollout: Rollout) -> Conversation:
    assert rollout.conversation is not None, "rollouts of a conversation environment are conversations"
    return rollout.conversation


def _answer(environment: ConversationEnvironment, rows: Sequence[Rollout]) -> str:
    return rows[-1].completion if environment.marks_reasoning else _episode(rows).answer


def _episode(rows: Sequence[Rollout]) -> Episode:
    held = _conversation(rows[0])
    rewards = held.outcome.rewards if held.outcome else None
    if rewards is not None and rewards.keys() == {"reward"}:
        return Episode(held.messages, rewards["reward"], held.over)
    return Episode(held.messages, rewards, held.over)


def _grade_groups(
    environment: ConversationEnvironment, episodes: Sequence[Sequence[Rollout]], config: RewardConfig, grader: Grader
) -> Outcomes:
    """`grade` of each group that has an episode without rewards; failed episodes are not passed to it."""
    outcomes: Outcomes = [_conversation(rows[0]).outcome for rows in episodes]
    groups = [
        list(members) for _, members in groupby(range(len(episodes)), key=lambda number: episodes[number][0].group)
    ]
    sound = [[n for n in group if (known := outcomes[n]) is None or not known.cause] for group in groups]
    open_groups = [group for group in sound if any(outcomes[number] is None for number in group)]

    shown = [(episodes[group[0]][0].example, [_episode(episodes[number]) for number in group]) for group in open_groups]
    if isinstance(grader, Workers):
        found_of_groups = _grade_in_workers(grader, shown)
    else:
        found_of_groups = _grade_here(environment, shown, config)
    for group, found in zip(open_groups, found_of_groups):
        for number, outcome in zip(group, found):
            outcomes[number] = outcomes[number] or outcome
    return outcomes


def _grade_in_workers(workers: Workers, groups: Sequence[Group]) -> list[Outcomes]:
    """If a group's `grade` exceeds a limit, the whole group fails."""
    seeds = [zlib.crc32("".join(episode.answer for episode in shown).encode()) for _, shown in groups]
    tasks = [task_of(example, seed, shown) for seed, (example, shown) in zip(seeds, groups)]
    return [
        said.outcomes if isinstance(said, Graded) else [said.outcome] * len(shown)
        for said, (_, shown) in zip(hosted(tasks, workers), groups)
    ]


def _grade_here(environment: ConversationEnvironment, groups: Sequence[Group], config: RewardConfig) -> list[Outcomes]:
    async def grade(example: Example, shown: Sequence[Episode], places: asyncio.Semaphore) -> Outcomes:
        async with places:
            return await graded(environment, example, shown, config.seconds)

    async def grade_all() -> list[Outcomes]:
        places = asyncio.Semaphore(config.concurrent)
        return await asyncio.gather(*(grade(example, shown, places) for example, shown in groups))

    running = asyncio.run_coroutine_threadsafe(grade_all(), event_loop())
    pulse = Pulse(environment, config.seconds)
    try:
        while not running.done():
            concurrent.futures.wait([running], timeout=min(1.0, config.seconds / 4))
            pulse.check("grade")
    finally:
        running.cancel()
    return running.result()


def _with_names_of_others(outcomes: list[Outcome], held: Sequence[Conversation]) -> list[Outcome]:
    """The single number of a conversation that ended at its limit is used for every name in the others' rewards."""
    named = (o.rewards for o, conversation in zip(outcomes, held) if not o.cause and not conversation.over)
    names = next(named, {})
    return [
        replace(outcome, rewards=dict.fromkeys(names, outcome.rewards["reward"]))
        if conversation.over and names and outcome.rewards.keys() == {"reward"} != names.keys()
        else outcome
        for outcome, conversation in zip(outcomes, held)
    ]
