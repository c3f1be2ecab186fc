"""Rewards of conversations: what `converse` returned, else what `grade` says of the group, else `reward`."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from lockstep.config import RewardConfig
from lockstep.rl.conversations.hosting import Pulse, awaited
from lockstep.rl.conversations.protocol import ConversationEnvironment, Episode
from lockstep.rl.environment import Environment, Example
from lockstep.rl.rewards.calling import (
    INVALID,
    Grader,
    Outcome,
    about,
    event_loop,
    failed,
    failure,
    outcome_of,
    within,
)
from lockstep.rl.rollouts import Conversation, Rollout

Outcomes = list[Outcome | None]


def grade_conversations(
    environment: ConversationEnvironment,
    episodes: Sequence[Sequence[Rollout]],
    config: RewardConfig,
    grader: Grader,
) -> list[Outcome]:
    """What came of each episode's rewards, in order; `reward` runs in `grader`. Episodes of a group stand together."""
    held = [_conversation(rows[0]) for rows in episodes]
    outcomes: Outcomes = [conversation.outcome for conversation in held]
    if type(environment).grade is not ConversationEnvironment.grade:
        outcomes = _grade_groups(environment, episodes, config)
    alone = [number for number, outcome in enumerate(outcomes) if outcome is None]
    if alone and not _has_reward(environment):
        graded_too = type(environment).grade is not ConversationEnvironment.grade
        problem = f"returned no rewards{', nor did `grade`' if graded_too else ''}, and there is no `reward`,"
        for number in alone:
            said = about(environment, episodes[number][-1].example, problem, "converse")
            said += "; return a number from `converse`, or write `grade` or `reward`"
            outcomes[number] = failure(INVALID, said)
    elif alone:
        jobs = [(episodes[number][-1].example, _episode(episodes[number]).answer) for number in alone]
        for number, outcome in zip(alone, grader(jobs)):
            outcomes[number] = outcome
    graded = [outcome for outcome in outcomes if outcome is not None]
    return _with_names_of_others(graded, held)


def _has_reward(environment: ConversationEnvironment) -> bool:
    return bool(environment.rewards) or type(environment).reward is not Environment.reward


def _conversation(rollout: Rollout) -> Conversation:
    assert rollout.conversation is not None, "rollouts of a conversation environment are conversations"
    return rollout.conversation


def _episode(rows: Sequence[Rollout]) -> Episode:
    held = _conversation(rows[0])
    rewards = held.outcome.rewards if held.outcome else None
    if rewards is not None and rewards.keys() == {"reward"}:
        return Episode(held.messages, rewards["reward"], held.over)
    return Episode(held.messages, rewards, held.over)


def _grade_groups(
    environment: ConversationEnvironment, episodes: Sequence[Sequence[Rollout]], config: RewardConfig
) -> Outcomes:
    """`grade` of each group that has an episode without rewards; those that failed are not shown to it."""
    outcomes: Outcomes = [_conversation(rows[0]).outcome for rows in episodes]
    groups = [
        list(members) for _, members in groupby(range(len(episodes)), key=lambda number: episodes[number][0].group)
    ]
    sound = [[n for n in group if (known := outcomes[n]) is None or not known.cause] for group in groups]
    open_groups = [group for group in sound if any(outcomes[number] is None for number in group)]

    async def grade(group: list[int], places: asyncio.Semaphore) -> None:
        example, shown = episodes[group[0]][0].example, [_episode(episodes[number]) for number in group]
        async with places:
            found = await graded(environment, example, shown, config.seconds)
        for number, outcome in zip(group, found):
            outcomes[number] = outcomes[number] or outcome

    async def grade_all() -> None:
        places = asyncio.Semaphore(config.concurrent)
        await asyncio.gather(*(grade(group, places) for group in open_groups))

    running = asyncio.run_coroutine_threadsafe(grade_all(), event_loop())
    pulse = Pulse(environment, config.seconds)
    try:
        while not running.done():
            concurrent.futures.wait([running], timeout=min(1.0, config.seconds / 4))
            pulse.check("grade")
    finally:
        running.cancel()
    running.result()
    return outcomes


async def graded(
    environment: ConversationEnvironment, example: Example, episodes: Sequence[Episode], seconds: float
) -> Outcomes:
    try:
        rewards = await within(seconds, awaited(environment.grade, example, episodes))
    except BaseException as error:  # SystemExit too is the environment's
        return [failed(error, environment, example, "grade")] * len(episodes)
    if rewards is None:
        return [None] * len(episodes)
    try:
        each = list(rewards)
    except TypeError:
        each = []
    if len(each) != len(episodes):
        problem = f"returned {rewards!r:.80}, not a list with one reward for each episode (here {len(episodes)}),"
        return [failure(INVALID, about(environment, example, problem, "grade"))] * len(episodes)
    return [outcome_of(own, environment, example, "grade") for own in each]


def _with_names_of_others(outcomes: list[Outcome], held: Sequence[Conversation]) -> list[Outcome]:
    """One number for a conversation that ended at its limit stands for every name that the others' rewards have."""
    named = (o.rewards for o, conversation in zip(outcomes, held) if not o.cause and not conversation.over)
    names = next(named, {})
    return [
        replace(outcome, rewards=dict.fromkeys(names, outcome.rewards["reward"]))
        if conversation.over and names and outcome.rewards.keys() == {"reward"} != names.keys()
        else outcome
        for outcome, conversation in zip(outcomes, held)
    ]
