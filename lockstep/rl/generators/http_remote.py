"""A generator behind HTTP: a server, and the thread of this process that sends it requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from lockstep.errors import one_line
from lockstep.rl.generators.http_client import HttpClient, HttpError, Unreachable
from lockstep.rl.generators.http_servers import Server
from lockstep.rl.generators.remote import RemoteSample, Reports, Request
from lockstep.rl.generators.response_checks import InvalidResponse
from lockstep.rl.weights.server import WeightManifest

SILENCE_SECONDS = 10.0
"""A server that does not answer a health check for this long is considered dead; checks run every fifth of it."""
STILL_SECONDS = 120.0
"""So is one that answers, but adds no token to any of its samples for this long."""
BUSY_SECONDS = 0.5
"""Delay before a request that the server had no room for is sent again."""
FLUSH_SECONDS = 0.005
"""How long new tokens are collected before they are reported together."""


class HttpRemote:
    """A server at `client.url`, with one HTTP request for each of the fleet's. A `Remote`; any thread may call it.

    Between `ask` and the report of its last token the request's stream is open; `abort` closes it, and the server then
    ends its samples. `manifest["folder"]` of new weights is a model folder that the server can read.
    """

    def __init__(
        self,
        client: HttpClient,
        server: Server,
        reports: Reports,
        silence_seconds: float = SILENCE_SECONDS,
        still_seconds: float = STILL_SECONDS,
        finish: bool = False,
    ):
        """finish: whether requests in flight end before it takes new weights."""
        self.name, self.room, self.exact = client.url, server.room, server.exact
        self.did: dict[str, float] = {}
        self.gone = threading.Event()
        """Set once it is lost or closed."""
        self._client, self._server, self._reports = client, server, reports
        self._silence_seconds, self._still_seconds = silence_seconds, still_seconds
        self._finish = finish or server.loads_between_requests
        self._versions: set[int] = set()
        self._version = -1
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._aborted: set[int] = set()
        self._told: list[tuple[int, int, RemoteSample]] = []
        self._heard = 0.0
        self._loop = asyncio.new_event_loop()
        # Requests and new weights, in the order in which they came.
        self._orders: asyncio.Queue[Request | WeightManifest] = asyncio.Queue()
        self._ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"http {client.url}", daemon=True)
        self._thread.start()

    def ask(self, request: Request) -> None:
        # As it is now: its samples grow while it waits here.
        samples = [dataclasses.replace(sample, token_ids=list(sample.token_ids)) for sample in request.samples]
        self._post(self._orders.put_nowait, dataclasses.replace(request, samples=samples))

    def abort(self, request_id: int) -> None:
        self._post(self._abort, request_id)

    def load_weights(self, manifest: WeightManifest) -> None:
        self._post(self._orders.put_nowait, manifest)

    def close(self) -> None:
        self._post(self._end, None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # it is over
            self._loop.call_soon_threadsafe(function, *arguments)

    # From here on: its own thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            why = self._loop.run_until_complete(self._work())
        except Exception as error:  # whatever it is, no more samples will arrive
            why = error
        finally:
            self._loop.close()
            self.gone.set()
        if why is not None:
            self._reports.lost(self, _in_words(why), not isinstance(why, HttpError | Unreachable))

    async def _work(self) -> BaseException | None:
        """Until it is closed, or lost; returns why."""
        duties = [asyncio.ensure_future(self._take_orders()), asyncio.ensure_future(self._watch())]
        for duty in duties:
            duty.add_done_callback(self._duty_done)
        why = await self._ended
        everything = [*duties, *self._tasks.values()]
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
        return why

    def _end(self, why: BaseException | None) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    def _duty_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._end(error)

    async def _take_orders(self) -> None:
        while True:
            order = await self._orders.get()
            if isinstance(order, Request):
                if order.id not in self._aborted:
                    self._tasks[order.id] = task = asyncio.ensure_future(self._sample(order))
                    self._heard = self._loop.time()
                    task.add_done_callback(self._duty_done)
                self._aborted.discard(order.id)
            else:
                await self._load(order)

    async def _load(self, manifest: WeightManifest) -> None:
        version = manifest["version"]
        if version <= self._version:
            return  # it has newer ones already
        if self._finish and self._tasks:
            await asyncio.wait(self._tasks.values())
        # Its next tokens may already be from these before it says so.
        self._versions.add(version)
        try:
            await self._server.load(self._client, Path(manifest["folder"]), version)
        except HttpError as error:
            manifests = [order for order in self._orders._queue if not isinstance(order, Request)]  # type: ignore[attr-defined]
            if manifests and manifests[-1]["version"] > version:
                # Superseded, and perhaps deleted by now. Later requests must not be sampled from older weights.
                return await self._load(manifests[-1])
            if self._version < 0:
                problem = f"it cannot load the weights in {manifest['folder']}: {error.message}"
                self._reports.unfit(self, f"{problem}; give an --output that the server can read under the same path")
                self._end(None)
                return
            raise
        self._version = version
        self._heard = self._loop.time()
        if not self._ended.done():
            self._reports.has_weights(self, version)

    def _abort(self, request_id: int) -> None:
        if task := self._tasks.pop(request_id, None):
            task.cancel()
        else:
            waiting = (order.id for order in self._orders._queue if isinstance(order, Request))  # type: ignore[attr-defined]
            if request_id in waiting:
                self._aborted.add(request_id)

    async def _sample(self, request: Request) -> None:
        unfinished = {index for index, sample in enumerate(request.samples) if sample.finish_reason is None}
        try:
            while True:
                try:
                    async with aclosing(self._server.sample(self._client, request, self._version)) as parts:
                        async for index, new in parts:
                            if new.finish_reason == "error":  # a server would say why
                                raise InvalidResponse("finish_reason 'error'")
                            self._tell(request.id, index, new)
                            if new.finish_reason is not None:
                                unfinished.discard(index)
                    break
                except HttpError as error:
                    if error.status != 429:
                        raise
                await asyncio.sleep(BUSY_SECONDS)
            if unfinished:
                self._flush()  # which may show why
                raise Unreachable("a request ended without all of its samples")
        except HttpError as error:
            if error.code == "not_finite":
                for index in unfinished:
                    self._tell(request.id, index, RemoteSample(finish_reason="error"))
            elif error.status in (400, 408, 413) or error.code == "deadline":
                self._flush()
                self._reports.refused(self, request.id, f"{self.name} refuses a request: {error.message}")
            else:
                raise
        finally:
            self._tasks.pop(request.id, None)

    def _tell(self, request_id: int, index: int, new: RemoteSample) -> None:
        self._heard = self._loop.time()
        if unknown := [version for version in new.versions if version not in self._versions]:
            raise Unreachable(
                f"it samples from weights version {one_line(unknown[0], 40)}, which this run has not published; is "
                "another run using it?"
            )
        if not self._told:
            self._loop.call_later(FLUSH_SECONDS, self._flush)
        self._told.append((request_id, index, new))

    def _flush(self) -> None:
        told, self._told = self._told, []
        if told and not self._ended.done():
            try:
                self._reports.sampled(self, told)
            except InvalidResponse as error:
                self._end(error)

    async def _watch(self) -> None:
        """Raises if the server is dead, or as good as."""
        while True:
            try:
                await self._client.call("GET", "/health", seconds=self._silence_seconds)
            except TimeoutError as error:
                raise Unreachable(f"it has not answered for {self._silence_seconds:g} s") from error
            still = self._loop.time() - self._heard
            if self._tasks and still > self._still_seconds:
                raise Unreachable(f"it has sampled no token for {still:.0f} s, although it has requests")
            await asyncio.sleep(self._silence_seconds / 5)


def _in_words(error: BaseException) -> str:
    if isinstance(error, HttpError):
        return f"it responds: {error}"
    if isinstance(error, Unreachable | InvalidResponse):
        return str(error)
    return f"its response makes no sense ({one_line(repr(error))})"
