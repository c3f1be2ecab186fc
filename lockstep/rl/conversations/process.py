"""The process of one conversation, or of one group's `grade`: forked, and ended, by its supervisor."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.config import RewardConfig
from lockstep.rl.conversations.exchange import (
    ConversationEnded,
    Event,
    GroupGraded,
    ReplyRequest,
    event_data,
    reply_from,
)
from lockstep.rl.conversations.protocol import ConversationEnvironment, Episode
from lockstep.rl.conversations.runner import BlockedError, ConversationRunner, LoopWatchdog, grade_group
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading.calling import INVALID, TIMEOUT, call_problem, event_loop, failure, outcome_of_error
from lockstep.rl.grading.frames import Closed, encode, receive


def run_task(
    environment: Environment, limits: dict[str, Any], number: int, task: dict[str, Any], pipe: int, max_bytes: int
) -> None:
    """Runs `task`, with events and replies through `pipe`; never returns.

    `task` has the `method` (`converse` or `grade`), the `example`, the `episodes` of a group, and a `seed`.
    """
    assert isinstance(environment, ConversationEnvironment)
    pid = os.getpid()
    example, method = Example(**task["example"]), task["method"]
    _seed(task["seed"])

    def emit(event: Event) -> None:
        if os.getpid() != pid:
            os._exit(0)  # the environment forked, and this is the child
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        data, is_last = encode(event_data(event)), not isinstance(event, ReplyRequest)
        if len(data) > max_bytes:
            problem = call_problem(
                environment, example, f"sent a message of {len(data):,} bytes, more than {max_bytes:,},", method
            )
            data = encode(event_data(ConversationEnded(number, [], False, failure(INVALID, problem), {})))
            is_last = True
        os.set_blocking(pipe, True)
        left = memoryview(data)
        while left:
            left = left[os.write(pipe, left) :]
        if is_last:
            os._exit(0)

    try:
        config = RewardConfig(**limits)
        if method == "grade":
            episodes = [Episode(*episode) for episode in task["episodes"]]
            emit(_grade(environment, example, episodes, config, number))
        else:
            _converse(environment, example, config, number, pipe, emit)
    except BlockedError as error:
        problem = call_problem(environment, example, "has not awaited anything for rewards.seconds", method)
        emit(ConversationEnded(number, [], False, failure(TIMEOUT, f"{error.location}: {problem}"), {}))
    except MemoryError as error:
        emit(ConversationEnded(number, [], False, outcome_of_error(error, environment, example, method), {}))


def _converse(
    environment: ConversationEnvironment,
    example: Example,
    config: RewardConfig,
    number: int,
    pipe: int,
    emit: Callable[[Event], None],
) -> None:
    with ConversationRunner(environment, [example], config, patience=1) as runner:

        def receive_replies() -> None:
            buffer = bytearray()
            try:
                while True:
                    request, reply = receive(pipe, buffer)
                    runner.answer(0, request, reply_from(reply))
            except Closed:
                os._exit(0)  # the supervisor is gone

        threading.Thread(target=receive_replies, name="replies", daemon=True).start()
        while event := runner.next(wait=True):
            emit(replace(event, number=number))


def _grade(
    environment: ConversationEnvironment, example: Example, episodes: list[Episode], config: RewardConfig, number: int
) -> GroupGraded:
    grading = grade_group(environment, example, episodes, config.seconds)
    running = asyncio.run_coroutine_threadsafe(grading, event_loop())
    watchdog = LoopWatchdog(environment, config.seconds, patience=1)
    while not running.done():
        concurrent.futures.wait([running], timeout=min(1.0, config.seconds / 4))
        if not running.done():
            watchdog.check("grade")
    return GroupGraded(number, running.result())


def _seed(seed: int) -> None:
    """Seeds global generators, whose state all forks share otherwise; a restarted conversation draws the same."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
