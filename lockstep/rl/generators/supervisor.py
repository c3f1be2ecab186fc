"""Starts the run's generators, on its host or through Monarch on others, and restarts them when they die."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from lockstep.config import ActorsConfig
from lockstep.config.actors import LOCAL, worker_address
from lockstep.errors import UserError
from lockstep.observe import log
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.ranks import Group, end_ranks, start_ranks, start_stand_in

CHECK_SECONDS = 0.1
"""Seconds between checks of the processes."""
MOST_FAILURES = 3
"""Starts of a generator in a row without it becoming ready, after which the run ends."""
END_SECONDS = 5.0
"""Seconds that processes have to end before they are killed."""
CONNECT_SECONDS = 5.0
AGAIN_SECONDS = 0.5
"""Seconds between attempts to reach a Monarch worker that is not up yet."""


class GeneratorSupervisor:
    """Runs `config.generators` generators on `config.hosts`. A context manager; leaving it ends them all."""

    def __init__(self, config: ActorsConfig, pool: GeneratorPool, address: str, key: bytes, device: str, logs: Path):
        """logs: the folder for their output."""
        self._config, self._pool, self._address = config, pool, address
        self._key, self._device, self._logs = key, device, logs
        names = [f"generator_{number}" for number in range(config.generators)]
        self._hosts = dict(zip(names, itertools.cycle(config.hosts or [LOCAL])))
        """LOCAL, or the address of the Monarch worker that starts it, by generator."""
        self._ending = threading.Event()
        # Processes die with the thread that started them, so each generator has one for the whole run.
        self._threads = [threading.Thread(target=self._run, args=(name,), name=name, daemon=True) for name in names]

    def __enter__(self) -> GeneratorSupervisor:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._pool.required |= self._hosts.keys()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_restarting()
        for thread in self._threads:
            thread.join()

    def stop_restarting(self) -> None:
        """Generators that end from now on are not restarted: call it before telling them to end."""
        self._ending.set()

    def _run(self, name: str) -> None:
        failures = 0
        while name not in self._pool.banned:
            try:
                ranks = self._start(name)
            except OSError as error:
                self._pool.fail(self._pool.no_generators_error(f"generators cannot be started: {error}"))
                return
            why, was_ready = self._watch(name, ranks)
            remote, ended = self._pool.remote(name), _ended(ranks)
            if why and remote:
                self._pool.lost(remote, f"it {why}")
            end_ranks(ranks)
            if not why:
                return
            if remote:
                remote.close()
            failures = 0 if was_ready else failures + 1
            if failures == MOST_FAILURES:
                log_file = self._log(name, min(ended, default=0))
                problem = f"{name} {why} before it could sample, {MOST_FAILURES} times in a row"
                problem += f". {log_file} ends with: {_last_line(log_file)}"
                self._pool.fail(self._pool.no_generators_error(problem))
                return
            if name not in self._pool.banned:
                log.warning("%s %s; restarting it", name, why)

    def _watch(self, name: str, ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[str, bool]:
        """Returns once a generator must be restarted: why, and whether it was ever ready.

        If the run ends first, waits for its processes to end; why is empty.
        """
        started, has_joined, was_ready = time.monotonic(), False, False
        while not self._ending.wait(CHECK_SECONDS):
            has_joined |= self._pool.remote(name) is not None
            was_ready |= name in self._pool.ready
            is_removed = name in self._pool.banned or (has_joined and self._pool.remote(name) is None)
            if is_removed and self._ending.wait(CHECK_SECONDS):  # a killed process loses its connections first
                break
            if ended := _ended(ranks):
                return _describe_exit(ended), was_ready
            if is_removed:
                return "was removed", was_ready
            if not was_ready and time.monotonic() - started > self._config.start_seconds:
                return "was not ready in time", was_ready
        until = time.monotonic() + END_SECONDS
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, until - time.monotonic()))
        return "", was_ready

    def _start(self, name: str) -> list[subprocess.Popen[bytes]]:
        arguments = ["--trainer", self._address, "--name", name]
        if self._device:
            arguments += ["--device", self._device]
        size, host = self._config.tensor, self._hosts[name]
        on_host = [other for other, its_host in self._hosts.items() if its_host == host]
        # The training ranks use the first GPUs of their host.
        training_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if host == LOCAL else 0
        first = training_ranks + size * on_host.index(name)
        group = Group(arguments, size, self._config.threads, size * len(on_host), first)
        logs = [self._log(name, rank) for rank in range(size)]
        with ExitStack() as opened:
            outputs = [opened.enter_context(log.open("ab")) for log in logs]
            if host == LOCAL:
                return start_ranks(group, self._key.hex(), outputs)
            return [start_stand_in(host, self._config.host, group, self._key.hex(), logs, outputs[0])]

    def _log(self, name: str, rank: int) -> Path:
        return self._logs / (f"{name}.log" if rank == 0 else f"{name}_rank_{rank}.log")


def _ended(ranks: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Exit codes of the ranks that have ended."""
    codes = {rank: process.poll() for rank, process in enumerate(ranks)}
    return {rank: code for rank, code in codes.items() if code is not None}


def _describe_exit(ended: Mapping[int, int]) -> str:
    """How the first of these ranks ended, from its exit code."""
    rank, code = min(ended.items())
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return how if rank == 0 else f"lost rank {rank}, which {how}"


def _last_line(file: Path) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "nothing"


def require_workers(actors: ActorsConfig) -> None:
    """Waits up to `actors.start_seconds` until every worker can be reached: they may be starting too.

    Raises UserError if one cannot, or if Monarch is not installed here.
    """
    if actors.workers and importlib.util.find_spec("monarch") is None:
        raise UserError(
            "actors.hosts names Monarch workers, but torchmonarch is not installed; pip install "
            "'torchmonarch>=0.7,<0.8' here and on their hosts, or start generators there with lockstep generator "
            "(actors.port)"
        )
    until = time.monotonic() + actors.start_seconds
    for worker in actors.workers:
        address = worker_address(worker)
        assert address is not None
        problem = _unreachable(address)
        if problem:
            log.warning("no Monarch worker at %s yet; waiting up to %g s", worker, actors.start_seconds)
        while problem:
            if time.monotonic() > until:
                raise UserError(
                    f"no Monarch worker can be reached at {worker}: {problem}; start one there, or correct actors.hosts"
                )
            time.sleep(AGAIN_SECONDS)
            problem = _unreachable(address)


def _unreachable(address: tuple[str, int]) -> OSError | None:
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None
