"""Results that clients retrieve after their requests: in memory until then, and within bounds."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import UserError
from lockstep.generate.server.api_error import ApiError, too_busy
from lockstep.train_server.wire import CONTENT_TYPE

MOST_BYTES = 1 << 28
"""Of results in memory; the oldest are dropped beyond."""
MOST_PROMISES, MOST_RETRIEVED = 20_000, 1_000
"""Of a session: all of them, beyond which requests are to be sent later; and those whose results the client has."""
MOST_WAITING = 256
"""Requests of a model that wait for their turn: their data are in memory."""
MISSING_SECONDS = 90.0
"""How long a model's requests wait for one with a lower number; a client sends a lost one again within 30 seconds."""
JSON = "application/json"

logger = logging.getLogger("lockstep.server")


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
    is_retrieved: bool = False
    is_dropped: bool = False
    """Whether its result was given up for want of memory."""

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
        self._sessions: dict[str, dict[str, Promise]] = {}
        """The promises of each session by id, oldest first."""
        self._by_id: dict[str, Promise] = {}
        self._retrieved: dict[str, deque[Promise]] = {}
        self._bytes = 0
        self._completions: dict[tuple[str, int], Completions] = {}

    def make(self, request_id: str, session_id: str, sampler: tuple[str, int] | None = None) -> Promise:
        """A new promise. Raises ApiError (429) if the session leaves too many results unretrieved."""
        own = self._sessions.setdefault(session_id, {})
        if len(own) >= MOST_PROMISES:
            raise too_busy(f"{len(own)} results of this session are not retrieved; retrieve some first")
        promise = own[request_id] = self._by_id[request_id] = Promise(request_id, session_id, sampler)
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
        except Exception as error:  # a promise without a result would be waited for without end
            logger.error("the request %s has failed", promise.request_id, exc_info=error)
            result = failure(f"internal error ({type(error).__name__}); see the server's log", "server")
        self.keep(promise, result)

    def keep(self, promise: Promise, result: Result) -> None:
        """The result, until it is retrieved; beyond `MOST_BYTES`, old ones are dropped, the session's own first."""
        promise.keep(result)
        self._bytes += len(result.body)
        if promise.sampler is not None:
            self.completions(promise.sampler).add(promise)
        own = self._sessions.get(promise.session_id, {})
        for old in itertools.chain(own.values(), self._by_id.values()) if self._bytes > MOST_BYTES else ():
            if old.result is not None and old is not promise:
                self._bytes -= len(old.result.body)
                old.result = None
                old.is_dropped = True
            if self._bytes <= MOST_BYTES:
                break

    def retrieved(self, promise: Promise) -> None:
        """The client has the result. It may ask once more; of what it has had, only the newest are kept."""
        if promise.is_retrieved:
            return
        promise.is_retrieved = True
        had = self._retrieved.setdefault(promise.session_id, deque())
        had.append(promise)
        if len(had) > MOST_RETRIEVED:
            self._drop(had.popleft())

    def _drop(self, promise: Promise) -> None:
        if promise.result is not None:
            self._bytes -= len(promise.result.body)
        if promise.task is not None:
            promise.task.cancel()
        self._by_id.pop(promise.request_id, None)
        self._sessions.get(promise.session_id, {}).pop(promise.request_id, None)

    def find(self, request_id: str) -> Promise | None:
        return self._by_id.get(request_id)

    def named(self, request_id: str) -> Promise:
        """Raises ApiError (404) for a result that is not there, or no longer."""
        promise = self._by_id.get(request_id)
        if promise is None or promise.is_dropped:
            raise ApiError(
                404,
                "the result of this request is not here: the server was restarted, the session has ended, or too many "
                "results were left unretrieved; send the request again, if need be with a new ServiceClient",
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
        for promise in list(self._sessions.pop(session_id, {}).values()):
            self._drop(promise)
        self._retrieved.pop(session_id, None)
        for sampler in [sampler for sampler in self._completions if sampler[0].startswith(f"{session_id}:")]:
            del self._completions[sampler]


class Turns:
    """Runs a model's requests one after the other, in the order of their numbers, whenever they arrive.

    A number that does not arrive, since its request was refused as too large or its client gave up, is skipped after
    `MISSING_SECONDS`, if others wait for it.
    """

    def __init__(self, promises: Promises, first: int, missing: Callable[[str], None]):
        """missing: called with what to tell the client when a number is skipped."""
        self._promises, self._next, self._missing = promises, first, missing
        self._waiting: dict[int, tuple[Promise, Callable[[], Awaitable[Result]]]] = {}
        self._promised: dict[int, str] = {}
        self._arrived = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def promised(self, number: int) -> str | None:
        """The id of the request with this number, if it has been sent before."""
        return self._promised.get(number)

    def add(self, number: int, promise: Promise, work: Callable[[], Awaitable[Result]]) -> None:
        """Raises ApiError (429) if too many wait for a number that has not arrived."""
        if len(self._waiting) >= MOST_WAITING:
            raise too_busy(f"{len(self._waiting)} requests of this model wait for request {self._next}")
        self._promised[number] = promise.request_id
        if number < self._next:
            self._promises.keep(promise, failure(f"request {number} has arrived after the ones that follow it"))
            return
        self._waiting[number] = promise, work
        self._arrived.set()
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._waiting:
            if self._next not in self._waiting and not await self._arrives():
                self._missing(f"request {self._next} has not arrived; it may have been too large")
                self._next = min(self._waiting)
            promise, work = self._waiting.pop(self._next)
            self._next += 1
            self._promises.begin(promise, work)
            assert promise.task is not None
            await asyncio.wait({promise.task})

    async def _arrives(self) -> bool:
        """Waits for the next number; False if it does not come."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MISSING_SECONDS):
                while self._next not in self._waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
        return self._next in self._waiting

    def end(self) -> None:
        """Fails what has not begun."""
        if self._running is not None:
            self._running.cancel()
        for promise, _ in self._waiting.values():
            self._promises.keep(promise, failure("the model was unloaded before this request"))
        self._waiting.clear()
