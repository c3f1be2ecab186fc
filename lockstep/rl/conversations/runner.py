"""Runs the environment's side of conversations: coroutines that send requests to the model and receive its replies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config import RewardConfig
from lockstep.errors import UserError
from lockstep.rl.conversations.chat import Chat, ConversationOver, Reply
from lockstep.rl.conversations.protocol import ConversationEnvironment, Episode
from lockstep.rl.environments.protocol import Example, Message, source_file
from lockstep.rl.grading.calling import (
    INVALID,
    PATIENCE,
    Outcome,
    TimeUpError,
    call_problem,
    error_text,
    event_loop,
    failure,
    outcome_of,
    outcome_of_error,
    retrieve_error,
    with_timeout,
)
from lockstep.rl.grading.exchange import ConversationEnded, ReplyRequest, checked_seconds, plain_messages

Outcomes = list[Outcome | None]
Group = tuple[Example, Sequence[Episode]]
"""The arguments of `grade`."""

LIMIT = "the conversation is at its limit of turns or of tokens"


class ConversationRunner:
    """Runs one conversation per example, numbered by the example's index. A context manager.

    Up to `rewards.concurrent` environments have their turn at a time, each for at most `rewards.seconds` from a reply
    to the next request; the other conversations wait for the model.
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
        self._events: queue.SimpleQueue[ReplyRequest | ConversationEnded] = queue.SimpleQueue()
        self._conversations: dict[int, _Conversation] = {}
        self._watchdog = LoopWatchdog(environment, config.seconds, patience)
        self._running = asyncio.run_coroutine_threadsafe(self._converse_all(), self._loop)

    def __enter__(self) -> ConversationRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.cancel()

    def next(self, wait: bool) -> ReplyRequest | ConversationEnded | None:
        """The next event of a conversation; None if there is none and `wait` is False.

        Raises UserError, with file and line, if the environment blocks the event loop for too long.
        """
        while True:
            with suppress(queue.Empty):
                return self._events.get(block=wait, timeout=min(1.0, self.config.seconds / 4))
            if self._running.done():
                self._running.result()
            if not wait:
                return None
            self._watchdog.check("converse")

    def answer(self, number: int, request: int, reply: Reply | None) -> None:
        """Answers a request of a conversation; None: the conversation is at a limit and gets no more replies."""
        self._loop.call_soon_threadsafe(self._conversations[number].receive, request, reply)

    async def _converse_all(self) -> None:
        slots = asyncio.Semaphore(self.config.concurrent)
        for number, example in enumerate(self.examples):
            self._conversations[number] = _Conversation(number, example, self, slots)
        await asyncio.gather(*(conversation.run() for conversation in self._conversations.values()))

    def emit(self, event: ReplyRequest | ConversationEnded) -> None:
        self._events.put(event)


class _Conversation:
    """One conversation; its attributes are used only in the event loop's thread."""

    def __init__(self, number: int, example: Example, runner: ConversationRunner, slots: asyncio.Semaphore):
        self.number, self.example, self.runner, self.slots = number, example, runner, slots
        self.chat = Chat(self.ask)
        self.loop = asyncio.get_running_loop()
        self.time_up: asyncio.Future[None] = self.loop.create_future()
        self.requests = 0
        self.reply: asyncio.Future[Reply | None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Runs during the environment's turns."""
        self.resuming: asyncio.Task[None] | None = None
        """After a reply, waits for a free slot."""
        self.over = False
        self.began = 0.0
        self.seconds = 0.0
        """Total of the environment's turns so far."""

    async def run(self) -> None:
        await self._begin_turn()
        task = asyncio.ensure_future(call(self.runner.environment.converse, self.example, self.chat))
        task.add_done_callback(retrieve_error)
        try:
            await asyncio.wait({task, self.time_up}, return_when=asyncio.FIRST_COMPLETED)
            self._check_time()
            outcome = self._outcome(task)
        finally:
            self._end_turn()
            # If `converse` ignores its cancellation, it can make no more requests.
            self.time_up.cancel()
            task.cancel()
        messages: list[Message] = []
        seconds: dict[str, float] = {}
        problem = ""
        try:
            messages = plain_messages(self.chat.messages)
        except Exception as error:  # any: the environment's objects run their own code when they are read
            problem = f"left messages that are not plain data ({error_text(error)})"
        try:
            seconds = checked_seconds(self.chat.seconds)
        except Exception as error:
            problem = problem or f"left chat.seconds that does not map names to times ({error_text(error)})"
        if problem and (outcome is None or not outcome.cause):
            outcome = failure(INVALID, call_problem(self.runner.environment, self.example, problem, "converse"))
        self.runner.emit(ConversationEnded(self.number, messages, self.over, outcome, seconds, self.seconds))

    def _outcome(self, task: asyncio.Future[Any]) -> Outcome | None:
        environment, example = self.runner.environment, self.example
        if self.time_up.done():
            return outcome_of_error(TimeUpError(), environment, example, "converse")
        try:
            value = task.result()
        except ConversationOver:
            self.over, value = True, environment.unfinished
        except BaseException as error:  # including SystemExit, raised by the environment
            return outcome_of_error(error, environment, example, "converse")
        return None if value is None else _outcome_of(value, environment, example, "converse")

    async def ask(self, messages: Sequence[Message]) -> Reply:
        self._check_time()
        if self.over or self.time_up.done():
            # Yields to the others, and its time continues, even if a loop catches this and tries again.
            await asyncio.sleep(0)
            raise ConversationOver(LIMIT) if self.over else TimeoutError("this conversation has ended")
        if self.reply is not None:
            raise RuntimeError("a conversation can wait for only one reply at a time: await each before the next")
        plain = plain_messages(messages)
        self._end_turn()
        self.requests += 1
        self.reply = self.loop.create_future()
        try:
            self.runner.emit(ReplyRequest(self.number, self.requests, plain))
            reply = await self.reply
        finally:
            self.reply = None
            # Leftover tasks of a finished conversation take no slot.
            if not self.time_up.done():
                # In a separate task: the environment may cancel this one here, but its time must still run.
                self.resuming = asyncio.ensure_future(self._begin_turn())
                await asyncio.wait({self.resuming})
        if reply is None:
            self.over = True
            raise ConversationOver(LIMIT)
        return reply

    def receive(self, request: int, reply: Reply | None) -> None:
        """Takes the reply to `request`, unless that was abandoned; None ends the conversation at a limit."""
        if reply is None:
            self.over = True
        if (request == self.requests or reply is None) and self.reply is not None and not self.reply.done():
            self.reply.set_result(reply)

    async def _begin_turn(self) -> None:
        """Waits for a free slot and starts the environment's time."""
        await self.slots.acquire()
        self.began = self.loop.time()
        self.timer = self.loop.call_later(self.runner.config.seconds, self._set_time_up)

    def _end_turn(self) -> None:
        if self.resuming is not None:
            self.resuming.cancel()
            self.resuming = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
            self.seconds += self.loop.time() - self.began
            self.slots.release()

    def _check_time(self) -> None:
        # While the loop is blocked, the timer cannot fire.
        if self.timer is not None and self.loop.time() >= self.timer.when():
            self._set_time_up()

    def _set_time_up(self) -> None:
        if not self.time_up.done():
            self.time_up.set_result(None)


class BlockedError(UserError):
    """The environment blocks the event loop."""

    def __init__(self, message: str, location: str):
        super().__init__(message)
        self.location = location
        """File and line of the blocking call."""


class LoopWatchdog:
    """Checks from another thread that the event loop is responsive; reports the file and line that block it."""

    def __init__(self, environment: ConversationEnvironment, seconds: float, patience: float = PATIENCE):
        self._environment, self._seconds, self._limit = environment, seconds, patience * seconds
        self._loop = event_loop()
        self._responded = threading.Event()
        self._responded.set()
        self._pinged = 0.0
        self._warned = False

    def check(self, method: str) -> None:
        """Warns after `seconds` without a response from the loop. Raises BlockedError after `patience` times that."""
        if self._responded.is_set():
            self._responded.clear()
            self._pinged, self._warned = time.monotonic(), False
            self._loop.call_soon_threadsafe(self._responded.set)
            return
        waited = time.monotonic() - self._pinged
        if waited < self._seconds or (self._warned and waited < self._limit):
            return
        location = self._location()
        message = (
            f"{location}: {type(self._environment).__name__}.{method} has not awaited anything for {waited:.0f} s and "
            "blocks all other conversations; await slow operations, or run them in asyncio.to_thread"
        )
        if waited >= self._limit:
            raise BlockedError(message, location)
        self._warned = True
        from lockstep.observe import log  # imports torch, which a conversation's process does not need

        log.warning("%s", message)

    def _location(self) -> str:
        thread = next((t.ident for t in threading.enumerate() if t.name == "rewards"), None)
        frames = traceback.extract_stack(sys._current_frames()[thread]) if thread in sys._current_frames() else []
        file = source_file(type(self._environment))
        in_file = [f for f in frames if file is not None and Path(f.filename).resolve() == file.resolve()]
        candidates = in_file or list(frames)
        return f"{candidates[-1].filename}:{candidates[-1].lineno}" if candidates else "its code"


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function or coroutine function."""
    value = function(*arguments)
    return await value if inspect.isawaitable(value) else value


def grade_groups(
    environment: ConversationEnvironment, groups: Sequence[Group], config: RewardConfig, patience: float = PATIENCE
) -> list[Outcomes]:
    """The outcomes of `grade` for each group, up to `rewards.concurrent` at a time; None for each episode of one that
    returns no rewards. Raises BlockedError as `LoopWatchdog`."""

    async def grade(example: Example, episodes: Sequence[Episode], slots: asyncio.Semaphore) -> Outcomes:
        async with slots:
            return await _grade_group(environment, example, episodes, config.seconds)

    async def grade_all() -> list[Outcomes]:
        slots = asyncio.Semaphore(config.concurrent)
        return await asyncio.gather(*(grade(example, episodes, slots) for example, episodes in groups))

    running = asyncio.run_coroutine_threadsafe(grade_all(), event_loop())
    watchdog = LoopWatchdog(environment, config.seconds, patience)
    try:
        while not running.done():
            concurrent.futures.wait([running], timeout=min(1.0, config.seconds / 4))
            if not running.done():
                watchdog.check("grade")
    finally:
        running.cancel()
    return running.result()


async def _grade_group(
    environment: ConversationEnvironment, example: Example, episodes: Sequence[Episode], seconds: float
) -> Outcomes:
    try:
        rewards = await with_timeout(seconds, call(environment.grade, example, episodes))
        if rewards is None:
            return [None] * len(episodes)
        values = list(rewards) if isinstance(rewards, Iterable) else []
        shown = f"{rewards!r:.80}" if isinstance(rewards, Iterable) else f"a {type(rewards).__name__}"
    except BaseException as error:  # including SystemExit, raised by the environment
        return [outcome_of_error(error, environment, example, "grade")] * len(episodes)
    if len(values) != len(episodes):
        problem = f"returned {shown}, not a list with one reward per episode (here {len(episodes)}),"
        return [failure(INVALID, call_problem(environment, example, problem, "grade"))] * len(episodes)
    return [_outcome_of(value, environment, example, "grade") for value in values]


def _outcome_of(value: Any, environment: ConversationEnvironment, example: Example, method: str) -> Outcome:
    """As `outcome_of`; an error raised by the value itself is also a failure of the environment."""
    try:
        return outcome_of(value, environment, example, method)
    except BaseException as error:
        return outcome_of_error(error, environment, example, method)
