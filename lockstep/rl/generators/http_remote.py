"""A server used as a generator, and the thread that sends it requests."""

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
"""A server that does not answer a health check for this long counts as dead; checks run every fifth of it."""
STALL_SECONDS = 120.0
"""So does one that answers, but samples no token for any of its requests for this long."""
BUSY_SECONDS = 0.5
"""Delay before a request that the server had no room for is sent again."""
FLUSH_SECONDS = 0.005
"""Delay for which new tokens are collected and reported together."""


class HttpRemote:
    """A server at `client.url`, with one HTTP request per request of the pool. A `Remote`; thread-safe.

    A request's stream is open from `submit` until its last token is reported; `abort` closes it, and the server then
    ends its samples. `manifest["folder"]` of new weights is a model folder that the server can read.
    """

    def __init__(
        self,
        client: HttpClient,
        server: Server,
        reports: Reports,
        silence_seconds: float = SILENCE_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        finish: bool = False,
    ):
        """finish: whether requests in flight end before it loads new weights."""
        self.name, self.capacity, self.exact = client.url, server.capacity, server.exact
        self.statistics: dict[str, float] = {}
        self.gone = threading.Event()
        """Set once it is lost or closed."""
        self._client, self._server, self._reports = client, server, reports
        self._silence_seconds, self._stall_seconds = silence_seconds, stall_seconds
        self._finish = finish or server.loads_between_requests
        self._versions: set[int] = set()
        self._version = -1
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._aborted: set[int] = set()
        self._pending: list[tuple[int, int, RemoteSample]] = []
        self._last_activity = 0.0
        self._loop = asyncio.new_event_loop()
        # Requests and new weights, in order of arrival.
        self._commands: asyncio.Queue[Request | WeightManifest] = asyncio.Queue()
        self._ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"http {client.url}", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        # A copy: the samples grow while the request waits here.
        samples = [dataclasses.replace(sample, token_ids=list(sample.token_ids)) for sample in request.samples]
        self._post(self._commands.put_nowait, dataclasses.replace(request, samples=samples))

    def abort(self, request_id: int) -> None:
        self._post(self._abort, request_id)

    def load_weights(self, manifest: WeightManifest) -> None:
        self._post(self._commands.put_nowait, manifest)

    def close(self) -> None:
        self._post(self._end, None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # In its thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            why = self._loop.run_until_complete(self._work())
        except Exception as error:  # after any error, no more samples arrive
            why = error
        finally:
            self._loop.close()
            self.gone.set()
        if why is not None:
            self._reports.lost(self, _describe(why), invalid=not isinstance(why, HttpError | Unreachable))

    async def _work(self) -> BaseException | None:
        """Runs until it is closed (returns None) or lost (returns the reason)."""
        background = [asyncio.ensure_future(self._process_commands()), asyncio.ensure_future(self._watch())]
        for task in background:
            task.add_done_callback(self._end_if_failed)
        why = await self._ended
        tasks = [*background, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return why

    def _end(self, why: BaseException | None) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    def _end_if_failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._end(error)

    async def _process_commands(self) -> None:
        while True:
            command = await self._commands.get()
            if isinstance(command, Request):
                if command.id not in self._aborted:
                    self._tasks[command.id] = task = asyncio.ensure_future(self._sample(command))
                    self._last_activity = self._loop.time()
                    task.add_done_callback(self._end_if_failed)
                self._aborted.discard(command.id)
            else:
                await self._load(command)

    async def _load(self, manifest: WeightManifest) -> None:
        version = manifest["version"]
        if version <= self._version:
            return  # the server has newer ones
        if self._finish and self._tasks:
            await asyncio.wait(self._tasks.values())
        # Tokens may already come from these before the response does.
        self._versions.add(version)
        try:
            await self._server.load(self._client, Path(manifest["folder"]), version)
        except HttpError as error:
            manifests = [command for command in self._commands._queue if not isinstance(command, Request)]  # type: ignore[attr-defined]
            if manifests and manifests[-1]["version"] > version:
                # Superseded, and perhaps deleted. Later requests must not be sampled from older weights.
                return await self._load(manifests[-1])
            if self._version < 0:
                problem = f"it cannot load the weights in {manifest['folder']}: {error.message}"
                change = "give an --output that the server can read under the same path"
                self._reports.incompatible(self, f"{problem}; {change}")
                self._end(None)
                return
            raise
        self._version = version
        self._last_activity = self._loop.time()
        if not self._ended.done():
            self._reports.has_weights(self, version)

    def _abort(self, request_id: int) -> None:
        if task := self._tasks.pop(request_id, None):
            task.cancel()
        else:
            waiting = (command.id for command in self._commands._queue if isinstance(command, Request))  # type: ignore[attr-defined]
            if request_id in waiting:
                self._aborted.add(request_id)

    async def _sample(self, request: Request) -> None:
        unfinished = {index for index, sample in enumerate(request.samples) if sample.finish_reason is None}
        try:
            while True:
                try:
                    async with aclosing(self._server.sample(self._client, request, self._version)) as parts:
                        async for index, new in parts:
                            if new.finish_reason == "error":  # a server responds with an HTTP error instead
                                raise InvalidResponse("finish_reason 'error'")
                            self._report(request.id, index, new)
                            if new.finish_reason is not None:
                                unfinished.discard(index)
                    break
                except HttpError as error:
                    if error.status != 429:
                        raise
                await asyncio.sleep(BUSY_SECONDS)
            if unfinished:
                self._flush()  # invalid tokens are the better explanation
                raise Unreachable("a request ended without all of its samples")
        except HttpError as error:
            if error.code == "not_finite":
                for index in unfinished:
                    self._report(request.id, index, RemoteSample(finish_reason="error"))
            elif error.status in (400, 408, 413) or error.code == "deadline":
                self._flush()
                self._reports.refused(self, request.id, f"{self.name} refuses a request: {error.message}")
            else:
                raise
        finally:
            self._tasks.pop(request.id, None)

    def _report(self, request_id: int, index: int, new: RemoteSample) -> None:
        self._last_activity = self._loop.time()
        if unknown := [version for version in new.versions if version not in self._versions]:
            raise Unreachable(
                f"it samples from weights version {one_line(unknown[0], 40)}, which this run has not published; is "
                "another run using it?"
            )
        if not self._pending:
            self._loop.call_later(FLUSH_SECONDS, self._flush)
        self._pending.append((request_id, index, new))

    def _flush(self) -> None:
        parts, self._pending = self._pending, []
        if parts and not self._ended.done():
            try:
                self._reports.sampled(self, parts)
            except InvalidResponse as error:
                self._end(error)

    async def _watch(self) -> None:
        """Raises Unreachable if the server is dead or stalled."""
        while True:
            try:
                await self._client.call("GET", "/health", seconds=self._silence_seconds)
            except TimeoutError as error:
                raise Unreachable(f"it has not answered for {self._silence_seconds:g} s") from error
            stalled = self._loop.time() - self._last_activity
            if self._tasks and stalled > self._stall_seconds:
                raise Unreachable(f"it has sampled no token for {stalled:.0f} s, although it has requests")
            await asyncio.sleep(self._silence_seconds / 5)


def _describe(error: BaseException) -> str:
    if isinstance(error, HttpError):
        return f"it responds: {error}"
    if isinstance(error, Unreachable | InvalidResponse):
        return str(error)
    return f"its response makes no sense ({one_line(repr(error))})"
