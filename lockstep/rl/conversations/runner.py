"""The environment's side of conversations: coroutines that send the model requests and receive its replies."""

from __future__ import annotations

import asyncio
import inspect
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config import RewardConfig
from lockstep.errors import UserError
from lockstep.rl.conversations.chat import Chat, ConversationOver, Reply
from lockstep.rl.conversations.exchange import Asked, Ended, plain, times
from lockstep.rl.conversations.protocol import ConversationEnvironment, Episode
from lockstep.rl.environments.protocol import Example, Message, source_file
from lockstep.rl.grading.calling import (
    INVALID,
    PATIENCE,
    Outcome,
    TimeUpError,
    about,
    described,
    event_loop,
    failed,
    failure,
    heard,
    outcome_of,
    within,
)

Outcomes = list[Outcome | None]

LIMIT = "the conversation is at its limit of turns or of tokens"


class ConversationRunner:
    """Conversations about `examples`, one each, by index. Plain data goes in and out. A context manager.

    In at most `rewards.concurrent` of them it is the environment's turn at a time, for at most `rewards.seconds` from
    one reply to the next request; the others wait for the model.
    """

    def __init__(
        self,
        environment: ConversationEnvironment,
        examples: Sequence[Example],
        config: RewardConfig,
        patience: float = PATIENCE,
    ):
        self.environment, self.examples, self.config = environment, examples, config
        self._loop = event_loop()
        self._said: queue.SimpleQueue[Asked | Ended] = queue.SimpleQueue()
        self._guests: dict[int, _Guest] = {}
        self._pulse = Pulse(environment, config.seconds, patience)
        self._running = asyncio.run_coroutine_threadsafe(self._converse_all(), self._loop)

    def __enter__(self) -> ConversationRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.cancel()

    def next(self, wait: bool) -> Asked | Ended | None:
        """The next message of a conversation; None if there is none and `wait` is False.

        Raises UserError, naming the line, if the environment blocks the event loop for too long.
        """
        while True:
            with suppress(queue.Empty):
                return self._said.get(block=wait, timeout=min(1.0, self.config.seconds / 4))
            if self._running.done():
                self._running.result()
            if not wait:
                return None
            self._pulse.check("converse")

    def answer(self, number: int, ask: int, reply: Reply | None) -> None:
        """Passes the model's reply to a conversation that has requested one; None: there will be no more."""
        self._loop.call_soon_threadsafe(self._guests[number].hear, ask, reply)

    async def _converse_all(self) -> None:
        places = asyncio.Semaphore(self.config.concurrent)
        for number, example in enumerate(self.examples):
            self._guests[number] = _Guest(number, example, self, places)
        await asyncio.gather(*(guest.converse() for guest in self._guests.values()))

    def say(self, said: Asked | Ended) -> None:
        self._said.put(said)


class _Guest:
    """One conversation."""

    def __init__(self, number: int, example: Example, runner: ConversationRunner, places: asyncio.Semaphore):
        self.number, self.example, self.runner, self.places = number, example, runner, places
        self.chat = Chat(self.ask)
        self.loop = asyncio.get_running_loop()
        self.time_up: asyncio.Future[None] = self.loop.create_future()
        self.asks = 0
        self.reply: asyncio.Future[Reply | None] | None = None
        self.alarm: asyncio.TimerHandle | None = None
        self.beginning: asyncio.Task[None] | None = None
        """Waits for a free slot, after a reply."""
        self.over = False
        self.began = 0.0
        self.seconds = 0.0
        """Total of the environment's turns so far."""

    async def converse(self) -> None:
        await self._begin()
        task = asyncio.ensure_future(awaited(self.runner.environment.converse, self.example, self.chat))
        task.add_done_callback(heard)
        try:
            await asyncio.wait({task, self.time_up}, return_when=asyncio.FIRST_COMPLETED)
            self._note_time()
            outcome = self._outcome(task)
        finally:
            self._pause()
            # One that runs on regardless can make no more requests.
            self.time_up.cancel()
            task.cancel()
        messages: list[Message] = []
        seconds: dict[str, float] = {}
        problem = ""
        try:
            messages = plain(self.chat.messages)
        except Exception as error:  # the messages are the environment's, and so is what reading them raises
            problem = f"left messages that are not plain data ({described(error)})"
        try:
            seconds = times(self.chat.seconds)
        except Exception as error:
            problem = problem or f"left chat.seconds that does not map names to times ({described(error)})"
        if problem and (outcome is None or not outcome.cause):
            outcome = failure(INVALID, about(self.runner.environment, self.example, problem, "converse"))
        self.runner.say(Ended(self.number, messages, self.over, outcome, seconds, self.seconds))

    def _outcome(self, task: asyncio.Future[Any]) -> Outcome | None:
        environment, example = self.runner.environment, self.example
        if self.time_up.done():
            return failed(TimeUpError(), environment, example, "converse")
        try:
            value = task.result()
        except ConversationOver:
            self.over, value = True, environment.unfinished
        except BaseException as error:  # including SystemExit, which is the environment's
            return failed(error, environment, example, "converse")
        return None if value is None else _outcome_of(value, environment, example, "converse")

    async def ask(self, messages: Sequence[Message]) -> Reply:
        self._note_time()
        if self.over or self.time_up.done():
            # Its time runs on, and the others get their turn, even if a loop catches this and tries again.
            await asyncio.sleep(0)
            raise ConversationOver(LIMIT) if self.over else TimeoutError("this conversation has ended")
        if self.reply is not None:
            raise RuntimeError("a conversation can wait for only one reply at a time: await each before the next")
        sent = plain(messages)
        self._pause()
        self.asks += 1
        self.reply = self.loop.create_future()
        try:
            self.runner.say(Asked(self.number, self.asks, sent))
            reply = await self.reply
        finally:
            self.reply = None
            # Tasks left behind by a finished conversation take up no slot.
            if not self.time_up.done():
                # In a separate task: the environment may cancel this one here, but its time must still run.
                self.beginning = asyncio.ensure_future(self._begin())
                await asyncio.wait({self.beginning})
        if reply is None:
            self.over = True
            raise ConversationOver(LIMIT)
        return reply

    def hear(self, ask: int, reply: Reply | None) -> None:
        """The reply to its request `ask`, which it may have given up; None: to all its requests from now on."""
        if reply is None:
            self.over = True
        if (ask == self.asks or reply is None) and self.reply is not None and not self.reply.done():
            self.reply.set_result(reply)

    async def _begin(self) -> None:
        """Starts the environment's time once there is a free slot."""
        await self.places.acquire()
        self.began = self.loop.time()
        self.alarm = self.loop.call_later(self.runner.config.seconds, self._ring)

    def _pause(self) -> None:
        if self.beginning is not None:
            self.beginning.cancel()
            self.beginning = None
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None
            self.seconds += self.loop.time() - self.began
            self.places.release()

    def _note_time(self) -> None:
        # Whatever blocks the loop also keeps the alarm from firing.
        if self.alarm is not None and self.loop.time() >= self.alarm.when():
            self._ring()

    def _ring(self) -> None:
        if not self.time_up.done():
            self.time_up.set_result(None)


class BlockedError(UserError):
    """The environment blocks the event loop."""

    def __init__(self, said: str, place: str):
        super().__init__(said)
        self.place = place
        """Its file and line."""


class Pulse:
    """Checks from another thread whether the event loop still turns, and reports the file and line that blocks it."""

    def __init__(self, environment: ConversationEnvironment, seconds: float, patience: float = PATIENCE):
        self._environment, self._seconds, self._most = environment, seconds, patience * seconds
        self._loop = event_loop()
        self._beat = threading.Event()
        self._beat.set()
        self._asked = 0.0
        self._warned = False

    def check(self, method: str) -> None:
        """Warns after `seconds` without a turn of the loop. Raises BlockedError after `patience` times as many."""
        if self._beat.is_set():
            self._beat.clear()
            self._asked, self._warned = time.monotonic(), False
            self._loop.call_soon_threadsafe(self._beat.set)
            return
        waited = time.monotonic() - self._asked
        if waited < self._seconds or (self._warned and waited < self._most):
            return
        place = self._place()
        said = (
            f"{place}: {type(self._environment).__name__}.{method} has not awaited anything for {waited:.0f} s and "
            "blocks all other conversations; await slow operations, or run them in asyncio.to_thread"
        )
        if waited >= self._most:
            raise BlockedError(said, place)
        self._warned = True
        from lockstep.observe import log  # imports torch, which a conversation's own process does not need

        log.warning("%s", said)

    def _place(self) -> str:
        thread = next((t.ident for t in threading.enumerate() if t.name == "rewards"), None)
        frames = traceback.extract_stack(sys._current_frames()[thread]) if thread in sys._current_frames() else []
        file = source_file(type(self._environment))
        own = [f for f in frames if file is not None and Path(f.filename).resolve() == file.resolve()]
        found = own or list(frames)
        return f"{found[-1].filename}:{found[-1].lineno}" if found else "its code"


async def awaited(function: Callable[..., Any], *arguments: Any) -> Any:
    value = function(*arguments)
    return await value if inspect.isawaitable(value) else value


async def graded(
    environment: ConversationEnvironment, example: Example, episodes: Sequence[Episode], seconds: float
) -> Outcomes:
    """The outcome of `grade` for each episode of a group; None if it returns no rewards."""
    try:
        rewards = await within(seconds, awaited(environment.grade, example, episodes))
    except BaseException as error:  # including SystemExit, which is the environment's
        return [failed(error, environment, example, "grade")] * len(episodes)
    if rewards is None:
        return [None] * len(episodes)
    try:
        each, shown = list(rewards), f"{rewards!r:.80}"
    except TypeError:
        each, shown = [], f"a {type(rewards).__name__}"
    except BaseException as error:
        return [failed(error, environment, example, "grade")] * len(episodes)
    if len(each) != len(episodes):
        problem = f"returned {shown}, not a list with one reward per episode (here {len(episodes)}),"
        return [failure(INVALID, about(environment, example, problem, "grade"))] * len(episodes)
    return [_outcome_of(own, environment, example, "grade") for own in each]


def _outcome_of(value: Any, environment: ConversationEnvironment, example: Example, method: str) -> Outcome:
    """As `outcome_of`; what reading the value raises is also a failure of the environment."""
    try:
        return outcome_of(value, environment, example, method)
    except BaseException as error:
        return failed(error, environment, example, method)
