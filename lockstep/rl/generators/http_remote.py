"""Servers behind HTTP as generators of the pool: the threads that call them, and their supervision."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import UserError
from lockstep.observe import log
from lockstep.rl.generators.http_servers import HttpClient, HttpError, Server, Unreachable, find_server
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.remote import InvalidResponse, RemoteSample, Request
from lockstep.rl.generators.spec import GeneratorSpec
from lockstep.rl.weights.server import WeightManifest

SILENCE_SECONDS = 10.0
"""A server that does not answer a health check for this long counts as dead; checks run every fifth of it."""
STALL_SECONDS = 120.0
"""So does one that answers, but samples no token for any of its requests for this long."""
BUSY_SECONDS = 0.5
"""Delay before a request that the server had no room for is sent again."""
RETRY_SECONDS = 5.0
"""Interval of checks for whether a lost server is back."""


class HttpRemote:
    """A `Remote`: a server, with one call, in a thread of its own, per request of the pool.

    A request's stream is open from `submit` until its last token; `abort` closes it, and the server then ends its
    samples. `manifest["folder"]` of new weights is a model folder that the server can read.
    """

    def __init__(
        self,
        url: str,
        server: Server,
        pool: GeneratorPool,
        silence_seconds: float = SILENCE_SECONDS,
        finish: bool = False,
    ):
        """finish: whether requests in flight end before it loads new weights."""
        self.name, self.capacity, self.exact = url, server.capacity, server.exact
        self.statistics: dict[str, float] = {}
        self.gone = threading.Event()
        """Set once it is lost or closed."""
        self._server, self._pool = server, pool
        self._silence_seconds, self._finish = silence_seconds, finish or server.loads_between_requests
        self._loaded: set[int] = set()
        """Weights versions that its tokens may come from."""
        self._version, self._newest = -1, WeightManifest()
        self._commands: queue.SimpleQueue[Request | WeightManifest | None] = queue.SimpleQueue()
        """Requests and new weights, in order of arrival."""
        self._lock = threading.Lock()
        self._clients = {"weights": HttpClient(url), "health": HttpClient(url)}
        """Of all calls, those of requests by their number."""
        self._samplers: list[threading.Thread] = []
        self._last_activity = time.monotonic()
        self._threads = [threading.Thread(target=work, name=url, daemon=True) for work in (self._work, self._watch)]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> None:
        with self._lock:
            self._clients[str(request.id)] = HttpClient(self.name)
        self._commands.put(request)

    def abort(self, request_id: int) -> None:
        with self._lock:
            if client := self._clients.pop(str(request_id), None):
                client.close()

    def load_weights(self, manifest: WeightManifest) -> None:
        self._newest = manifest
        self._commands.put(manifest)

    def close(self) -> None:
        self._end()
        for thread in (*self._threads, *self._samplers):
            thread.join()

    def _end(self) -> bool:
        """Ends all calls; whether this was the first to do so."""
        with self._lock:
            is_first = not self.gone.is_set()
            self.gone.set()
            for client in self._clients.values():
                client.close()
        self._commands.put(None)
        return is_first

    def _lose(self, error: Exception) -> None:
        if self._end():
            if isinstance(error, HttpError):
                why = f"it responds: {error}"
            elif isinstance(error, Unreachable | InvalidResponse):
                why = str(error)
            else:
                why = f"its response makes no sense ({error!r})"
            self._pool.lost(self, why, invalid=not isinstance(error, HttpError | Unreachable))

    def _work(self) -> None:
        try:
            while (command := self._commands.get()) is not None and not self.gone.is_set():
                if isinstance(command, Request):
                    self._last_activity = time.monotonic()
                    self._samplers = [thread for thread in self._samplers if thread.is_alive()]
                    self._samplers.append(threading.Thread(target=self._sample, args=(command,), daemon=True))
                    self._samplers[-1].start()
                else:
                    self._load(command)
        except Exception as error:
            self._lose(error)

    def _load(self, manifest: WeightManifest) -> None:
        version = manifest["version"]
        if version <= self._version:
            return  # the server has newer ones
        if self._finish:
            for thread in self._samplers:
                thread.join()
        # Tokens may already come from these before the response does.
        self._loaded.add(version)
        try:
            self._server.load(self._clients["weights"], Path(manifest["folder"]), version)
        except HttpError as error:
            if self._newest["version"] > version:
                # Superseded, and perhaps deleted. Later requests must not be sampled from older weights.
                return self._load(self._newest)
            if self._version >= 0:
                raise
            problem = f"it cannot load the weights in {manifest['folder']}: {error.message}"
            self._pool.incompatible(self, f"{problem}; give an --output that the server can read under the same path")
            self._end()
            return
        self._version, self._last_activity = version, time.monotonic()
        self._pool.has_weights(self, version)

    def _sample(self, request: Request) -> None:
        client = self._clients.get(str(request.id))
        if client is None:
            return  # aborted
        try:
            while not self._sample_once(request, client) and not client.closed.wait(BUSY_SECONDS):
                pass
        except Exception as error:
            if not client.closed.is_set():
                self._lose(error)
        finally:
            with self._lock:
                self._clients.pop(str(request.id), None)

    def _sample_once(self, request: Request, client: HttpClient) -> bool:
        """Reports all samples; False if the server has no room for the request."""
        unfinished = {index for index, sample in enumerate(request.samples) if sample.finish_reason is None}
        try:
            for index, new in self._server.sample(client, request, self._version):
                if new.finish_reason == "abort":
                    raise Unreachable("it ended a request with 'abort'")  # it shuts down
                if new.finish_reason is not None:
                    unfinished.discard(index)
                self._report(request.id, index, new)
        except HttpError as error:
            if error.status == 429:
                return False
            if error.code == "not_finite":
                for index in unfinished:
                    self._report(request.id, index, RemoteSample(finish_reason="error"))
            elif error.status in (400, 408, 413) or error.code == "deadline":
                self._pool.refused(self, request.id, f"{self.name} refuses a request: {error.message}")
            else:
                raise
            return True
        if unfinished:
            raise Unreachable("a request ended without all of its samples")
        return True

    def _report(self, request_id: int, index: int, new: RemoteSample) -> None:
        self._last_activity = time.monotonic()
        if unknown := [version for version in new.versions if version not in self._loaded]:
            raise Unreachable(
                f"it samples from weights version {unknown[0]}, which this run has not published; is another run using "
                "it?"
            )
        self._pool.sampled(self, [(request_id, index, new)])

    def _watch(self) -> None:
        try:
            while not self.gone.wait(self._silence_seconds / 5):
                self._clients["health"].call("GET", "/health", seconds=self._silence_seconds)
                stalled = time.monotonic() - self._last_activity
                if stalled > STALL_SECONDS and any(thread.is_alive() for thread in self._samplers):
                    raise Unreachable(f"it has sampled no token for {stalled:.0f} s, although it has requests")
        except TimeoutError:
            self._lose(Unreachable(f"it has not answered for {self._silence_seconds:g} s"))
        except Exception as error:
            self._lose(error)


class ServerSupervisor:
    """Adds the servers at `urls` to a run's pool. A context manager; entering it raises UserError for unsuitable ones.

    A lost server joins again, with the newest weights, once it answers correctly.
    """

    def __init__(
        self,
        urls: Sequence[str],
        spec: GeneratorSpec,
        pool: GeneratorPool,
        silence_seconds: float = SILENCE_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        finish: bool = False,
    ):
        """finish: as `HttpRemote`."""
        self._urls, self._spec, self._pool, self._finish = [url.rstrip("/") for url in urls], spec, pool, finish
        self._silence_seconds, self._retry_seconds = silence_seconds, retry_seconds
        self._remotes: dict[str, HttpRemote] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._retry_lost, name="http generators", daemon=True)

    @property
    def exact(self) -> bool:
        """Whether their log-probabilities match the trainer's bit for bit."""
        return all(remote.exact for remote in self._remotes.values())

    def __enter__(self) -> ServerSupervisor:
        for url, server in [(url, find_server(url, self._spec)) for url in self._urls]:
            self._pool.required.add(url)
            self._join(url, server)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        for name, remote in self._remotes.items():
            self._pool.leave(name)
            remote.close()

    def _join(self, url: str, server: Server) -> None:
        remote = HttpRemote(url, server, self._pool, self._silence_seconds, finish=self._finish)
        self._remotes[url] = remote
        self._pool.join(remote)

    def _retry_lost(self) -> None:
        problems: dict[str, str] = {}
        while not self._closing.wait(self._retry_seconds):
            for url, remote in list(self._remotes.items()):
                if not remote.gone.is_set() or self._closing.is_set() or url in self._pool.banned:
                    continue
                try:
                    server = find_server(url, self._spec)
                except UserError as error:
                    if problems.get(url) != str(error):
                        problems[url] = str(error)
                        log.warning("a lost server is not back: %s", error)
                    continue
                if server.exact != remote.exact:
                    continue  # another kind of server has taken its place
                # It was suitable once: if it no longer is, the run continues without it.
                self._pool.required.discard(url)
                problems.pop(url, None)
                log.info("%s is back", url)
                self._join(url, server)
