"""A run's servers: checked at the start, and retried after they were lost."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence

from lockstep.config import ActorsConfig
from lockstep.errors import UserError
from lockstep.observe import log
from lockstep.rl.generators.http_client import HttpClient, HttpError, Unreachable
from lockstep.rl.generators.http_remote import SILENCE_SECONDS, HttpRemote
from lockstep.rl.generators.http_servers import Server, ServerRequirements, find_server, owner_of
from lockstep.rl.generators.pool import GeneratorPool

RETRY_SECONDS = 5.0
"""Interval of checks for whether a lost server is back."""


def servers_are_exact(actors: ActorsConfig) -> bool:
    """Whether the log-probabilities of the servers at `actors.urls` match the trainer's bit for bit.

    Raises UserError if one does not answer, or the run's generators are of both kinds.
    """
    exact = {url: asyncio.run(owner_of(client_of(url)))[0] == "lockstep" for url in actors.urls}
    if any(exact.values()) and not all(exact.values()):
        listed = ", ".join(
            f"{url} ({'lockstep serve' if is_lockstep else 'vLLM'})" for url, is_lockstep in exact.items()
        )
        raise UserError(f"actors.urls: the log-probabilities of {listed} differ; give servers of one kind")
    if not all(exact.values()) and actors.processes:
        raise UserError(
            "actors.urls has vLLM servers, whose log-probabilities differ from those of other generators; use one kind"
        )
    return all(exact.values())


def client_of(url: str) -> HttpClient:
    """A client with the keys from the environment."""
    keys = os.environ.get("LOCKSTEP_API_KEY", ""), os.environ.get("LOCKSTEP_ADMIN_KEY", "")
    return HttpClient(url.rstrip("/"), *keys)


class ServerSupervisor:
    """Adds the servers at `urls` to a run's pool. A context manager; entering it raises UserError for unsuitable ones.

    Their keys are LOCKSTEP_API_KEY and LOCKSTEP_ADMIN_KEY from the environment. A lost server joins again, with the
    newest weights, once it answers correctly.
    """

    def __init__(
        self,
        urls: Sequence[str],
        requirements: ServerRequirements,
        pool: GeneratorPool,
        silence_seconds: float = SILENCE_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        finish: bool = False,
    ):
        """finish: as `HttpRemote`."""
        self._clients = [client_of(url) for url in urls]
        self._requirements, self._pool = requirements, pool
        self._silence_seconds, self._retry_seconds = silence_seconds, retry_seconds
        self._finish = finish
        self._remotes: dict[str, HttpRemote] = {}
        self._last_problem: dict[str, str] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._retry_lost, name="http generators", daemon=True)

    @property
    def exact(self) -> bool:
        """Whether their log-probabilities match the trainer's bit for bit."""
        return all(remote.exact for remote in self._remotes.values())

    def __enter__(self) -> ServerSupervisor:
        for client, server in [(client, self._find(client)) for client in self._clients]:
            self._pool.required.add(client.url)
            self._join(client, server)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        for name, remote in self._remotes.items():
            self._pool.leave(name)
            remote.close()

    def _find(self, client: HttpClient) -> Server:
        return asyncio.run(find_server(client, self._requirements))

    def _join(self, client: HttpClient, server: Server) -> None:
        remote = self._remotes[client.url] = HttpRemote(
            client, server, self._pool, self._silence_seconds, finish=self._finish
        )
        self._pool.join(remote)

    def _retry_lost(self) -> None:
        while not self._closing.wait(self._retry_seconds):
            for client in self._clients:
                if not self._remotes[client.url].gone.is_set() or self._closing.is_set():
                    continue
                if client.url in self._pool.banned:
                    continue
                try:
                    server = self._find(client)
                except Exception as error:  # a server that is starting, or another program, may answer anything
                    expected = isinstance(error, UserError | HttpError | Unreachable)
                    problem = str(error) if expected else f"its response makes no sense ({error!r})"
                    if self._last_problem.get(client.url) != problem:
                        self._last_problem[client.url] = problem
                        log.warning("%s is not back: %s", client.url, problem)
                    continue
                if server.exact != self._remotes[client.url].exact:
                    continue  # another kind of server has taken its place
                # It was suitable once: if it no longer is, the run continues without it.
                self._pool.required.discard(client.url)
                self._last_problem.pop(client.url, None)
                log.info("%s is back", client.url)
                self._join(client, server)
