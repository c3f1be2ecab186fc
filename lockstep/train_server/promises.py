"""Results that clients retrieve after their requests: in memory until then, and within bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import UserError
from lockstep.generate.server.api_error import ApiError, too_busy
from lockstep.train_server.wire import CONTENT_TYPE

MOST_BYTES = 1 << 28
"""Of results in memory; the oldest are dropped beyond."""
MOST_PROMISES = 1 << 16
"""Unretrieved, per session; further requests are to be sent later."""
JSON = "application/json"


@dataclass(frozen=True)
class Result:
    """What a request has come to."""

    body: bytes
    content_type: str = JSON
    failed: bool = False


def plain(values: dict[str, Any]) -> Result:
    return Result(json.dumps(values).encode())


def message(proto: Any) -> Result:
    return Result(proto.SerializeToString(), CONTENT_TYPE)


def failure(text: str, category: str = "user") -> Result:
    return Result(json.dumps({"error": text, "category": category}).encode(), failed=True)


@dataclass(eq=False)
class Promise:
    """A request's result, now or later."""

    request_id: str
    session_id: str
    sampler: tuple[str, int] | None = None
    """Sampling session and clone, if it is a sample."""
    result: Result | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    retrieved: bool = False

    def keep(self, result: Result) -> None:
        self.result = result
        self.done.set()


class Completions:
    """The finished samples of one client of a sampling session, in the order in which they finished."""

    def __init__(self) -> None:
        self.last = 0
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._more = asyncio.Event()

    def add(self, promise: Promise) -> None:
        assert promise.result is not None
        event: dict[str, Any] = {"request_id": promise.request_id, "state": "failed"}
        if not promise.result.failed:
            event |= {"state": "finished", "response_payload_uncompressed_size": len(promise.result.body)}
        self.last += 1
        self._events.append((self.last, event))
        self._more.set()

    async def after(self, cursor: int, seconds: float) -> tuple[list[dict[str, Any]], int]:
        """Those after a cursor, waiting for the first one, and the cursor behind them; those up to `cursor` are
        forgotten. A sample that finishes while this answer is sent is in the next one."""
        self._events = [(number, event) for number, event in self._events if number > cursor]
        if not self._events and seconds > 0:
            self._more.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), seconds)
        return [event for _, event in self._events], self._events[-1][0] if self._events else cursor


class Promises:
    """All sessions' promises. Used in the event loop alone."""

    def __init__(self) -> None:
        self._by_id: dict[str, Promise] = {}
        self._bytes = 0
        self._completions: dict[tuple[str, int], Completions] = {}
        self._dropped: set[str] = set()

    def make(self, request_id: str, session_id: str, sampler: tuple[str, int] | None = None) -> Promise:
        """A new promise. Raises ApiError (429) if the session leaves too many results unretrieved."""
        waiting = sum(not each.retrieved for each in self.of_session(session_id))
        if len(self._by_id) >= MOST_PROMISES and waiting > MOST_PROMISES // 2:
            raise too_busy(f"{waiting} results of this session are not retrieved; retrieve some first")
        promise = self._by_id[request_id] = Promise(request_id, session_id, sampler)
        return promise

    def begin(self, promise: Promise, work: Callable[[], Awaitable[Result]]) -> None:
        """Keeps the result of `work`, or why it failed."""
        promise.task = asyncio.ensure_future(self._run(promise, work))

    async def _run(self, promise: Promise, work: Callable[[], Awaitable[Result]]) -> None:
        try:
            result = await work()
        except UserError as error:
            result = failure(str(error))
        except ApiError as error:
            result = failure(error.message, "user" if error.status < 500 else "server")
        except asyncio.CancelledError:
            result = failure("the request was cancelled")
        self.keep(promise, result)

    def keep(self, promise: Promise, result: Result) -> None:
        promise.keep(result)
        self._bytes += len(result.body)
        if promise.sampler is not None:
            self.completions(promise.sampler).add(promise)
        for old in list(self._by_id.values()):
            if self._bytes <= MOST_BYTES:
                break
            if old.result is not None and old is not promise:
                self._drop(old)

    def _drop(self, promise: Promise) -> None:
        if promise.result is not None:
            self._bytes -= len(promise.result.body)
        if promise.task is not None:
            promise.task.cancel()
        del self._by_id[promise.request_id]

    def of_session(self, session_id: str) -> Iterator[Promise]:
        return (promise for promise in self._by_id.values() if promise.session_id == session_id)

    def find(self, request_id: str) -> Promise | None:
        return self._by_id.get(request_id)

    def named(self, request_id: str) -> Promise:
        """Raises ApiError (404) for a result that is not there, or no longer."""
        if (promise := self._by_id.get(request_id)) is None:
            raise ApiError(
                404,
                "the result of this request is not here: the server was restarted, the session has ended, or too many "
                "results were left unretrieved; send the request again in a new session",
            )
        return promise

    def completions(self, sampler: tuple[str, int]) -> Completions:
        return self._completions.setdefault(sampler, Completions())

    def cancel(self, request_id: str) -> None:
        """Ends a sample that its client no longer waits for; anything else goes on."""
        promise = self._by_id.get(request_id)
        if promise is not None and promise.sampler is not None and promise.task is not None:
            promise.task.cancel()

    def forget(self, session_id: str) -> None:
        """Drops a session's promises, and ends their work."""
        for promise in list(self.of_session(session_id)):
            self._drop(promise)
        for sampler in [sampler for sampler in self._completions if sampler[0].startswith(f"{session_id}:")]:
            del self._completions[sampler]


class Turns:
    """Runs a model's requests one after the other, in the order of their numbers, whenever they arrive."""

    def __init__(self, promises: Promises, first: int):
        self._promises, self._next = promises, first
        self._waiting: dict[int, tuple[Promise, Callable[[], Awaitable[Result]]]] = {}
        self._promised: dict[int, str] = {}
        self._running: asyncio.Task[None] | None = None

    def promised(self, number: int) -> str | None:
        """The id of the request with this number, if it has been sent before."""
        return self._promised.get(number)

    def add(self, number: int, promise: Promise, work: Callable[[], Awaitable[Result]]) -> None:
        self._promised[number] = promise.request_id
        self._waiting[number] = promise, work
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._next in self._waiting:
            promise, work = self._waiting.pop(self._next)
            self._next += 1
            self._promises.begin(promise, work)
            assert promise.task is not None
            await asyncio.wait({promise.task})

    def end(self) -> None:
        """Drops what has not begun."""
        self._waiting.clear()
