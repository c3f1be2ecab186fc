"""The process of one conversation, or of one group's `grade`: forked, and ended, by its keeper."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import sys
import threading
from dataclasses import replace
from typing import Any

from lockstep.config import RewardConfig
from lockstep.rl.conversations.exchange import Asked, Ended, Graded, Said, data_of, reply_of
from lockstep.rl.conversations.protocol import ConversationEnvironment, Episode
from lockstep.rl.conversations.runner import BlockedError, ConversationRunner, Pulse, graded
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading.calling import INVALID, TIMEOUT, about, event_loop, failed, failure
from lockstep.rl.grading.frames import Closed, encode, receive


def converse(
    environment: Environment, limits: dict[str, Any], number: int, task: dict[str, Any], pipe: int, most_bytes: int
) -> None:
    """Runs `task`, with messages and replies through `pipe`; never returns.

    `task` has the `method` (`converse` or `grade`), the `example`, the `episodes` of a group, and a `seed`.
    """
    assert isinstance(environment, ConversationEnvironment)
    own = os.getpid()
    example, method = Example(**task["example"]), task["method"]
    _seed(task["seed"])

    def say(said: Said) -> None:
        if os.getpid() != own:
            os._exit(0)  # the environment forked and returned twice: this is not the original process
        for printed in (sys.stdout, sys.stderr):
            printed.flush()
        data, over = encode(data_of(said)), not isinstance(said, Asked)
        if len(data) > most_bytes:
            problem = about(
                environment, example, f"sent a message of {len(data):,} bytes, more than {most_bytes:,},", method
            )
            data, over = encode(data_of(Ended(number, [], False, failure(INVALID, problem), {}))), True
        os.set_blocking(pipe, True)
        left = memoryview(data)
        while left:
            left = left[os.write(pipe, left) :]
        if over:
            os._exit(0)

    try:
        config = RewardConfig(**limits)
        if method == "grade":
            episodes = [Episode(*episode) for episode in task["episodes"]]
            say(_grade(environment, example, episodes, config, number))
        else:
            _converse(environment, example, config, number, pipe, say)
    except BlockedError as error:
        problem = about(environment, example, "has not awaited anything for rewards.seconds", method)
        say(Ended(number, [], False, failure(TIMEOUT, f"{error.place}: {problem}"), {}))
    except MemoryError as error:
        say(Ended(number, [], False, failed(error, environment, example, method), {}))


def _converse(
    environment: ConversationEnvironment, example: Example, config: RewardConfig, number: int, pipe: int, say: Any
) -> None:
    with ConversationRunner(environment, [example], config, patience=1) as runner:

        def hear() -> None:
            buffer = bytearray()
            try:
                while True:
                    ask, reply = receive(pipe, buffer)
                    runner.answer(0, ask, reply_of(reply))
            except Closed:
                os._exit(0)  # its keeper is gone

        threading.Thread(target=hear, name="replies", daemon=True).start()
        while True:
            match runner.next(wait=True):
                case Asked(_, ask, messages):
                    say(Asked(number, ask, messages))
                case Ended() as ended:
                    say(replace(ended, number=number))


def _grade(
    environment: ConversationEnvironment, example: Example, episodes: list[Episode], config: RewardConfig, number: int
) -> Graded:
    running = asyncio.run_coroutine_threadsafe(graded(environment, example, episodes, config.seconds), event_loop())
    pulse = Pulse(environment, config.seconds, patience=1)
    while not running.done():
        concurrent.futures.wait([running], timeout=min(1.0, config.seconds / 4))
        if not running.done():
            pulse.check("grade")
    return Graded(number, running.result())


def _seed(seed: int) -> None:
    """Without it, all processes forked from one would draw the same; a restarted conversation does draw the same."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
