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
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
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


@dataclass
class _Generator:
    """A generator of the run, and its current processes."""

    name: str
    host: str
    """LOCAL, or the address of the Monarch worker that starts it."""
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: float = 0.0
    has_joined: bool = False
    was_ready: bool = False
    failures: int = 0

    def ended(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended."""
        codes = {rank: process.poll() for rank, process in enumerate(self.ranks)}
        return {rank: code for rank, code in codes.items() if code is not None}


class GeneratorSupervisor:
    """Runs `config.generators` generators on `config.hosts`. A context manager; leaving it ends them all."""

    def __init__(self, config: ActorsConfig, pool: GeneratorPool, address: str, key: bytes, device: str, logs: Path):
        """logs: the folder for their output."""
        self._config, self._pool, self._address = config, pool, address
        self._key, self._device, self._logs = key, device, logs
        hosts = config.hosts or [LOCAL]
        names = [f"generator_{number}" for number in range(config.generators)]
        self._generators = [_Generator(name, host) for name, host in zip(names, itertools.cycle(hosts))]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="generators", daemon=True)

    def __enter__(self) -> GeneratorSupervisor:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._pool.required |= {generator.name for generator in self._generators}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_restarting()
        self._thread.join()

    def stop_restarting(self) -> None:
        """Generators that end from now on are not restarted: call it before telling them to end."""
        self._ending.set()

    def processes(self) -> dict[str, list[int]]:
        """The process id of each rank, by generator name."""
        return {generator.name: [rank.pid for rank in generator.ranks] for generator in self._generators}

    def _watch(self) -> None:
        # Processes die with the thread that started them, which is this one.
        try:
            for generator in self._generators:
                self._start(generator)
            while not self._ending.wait(CHECK_SECONDS):
                for generator in self._generators:
                    self._check(generator)
        except OSError as error:
            self._pool.fail(self._pool.no_generators_error(f"generators cannot be started: {error}"))
            self._ending.wait()
        until = time.monotonic() + END_SECONDS
        for rank in [rank for generator in self._generators for rank in generator.ranks]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, until - time.monotonic()))
        for generator in self._generators:
            end_ranks(generator.ranks)

    def _check(self, generator: _Generator) -> None:
        if generator.name in self._pool.banned:
            end_ranks(generator.ranks)
            generator.ranks = []
            return
        remote = self._pool.remote(generator.name)
        generator.has_joined |= remote is not None
        generator.was_ready |= generator.name in self._pool.ready
        ended = generator.ended()
        late = not generator.was_ready and time.monotonic() - generator.started > self._config.start_seconds
        if not ended and not late and (remote is not None or not generator.has_joined):
            return
        # Removed from the pool, or a rank has ended, or it is late: its remaining processes are killed.
        if not ended and not late:
            # A killed process loses its connections before it has an exit code.
            self._ending.wait(CHECK_SECONDS)
            ended = generator.ended()
        if self._ending.is_set():
            return
        why = _describe_exit(ended) if ended else "was not ready in time" if late else "was removed"
        if remote is not None:
            self._pool.lost(remote, f"it {why}")
        end_ranks(generator.ranks)
        if remote is not None:
            remote.close()
        generator.failures = 0 if generator.was_ready else generator.failures + 1
        if generator.failures >= MOST_FAILURES:
            log_file = self._log(generator, min(ended, default=0))
            self._pool.fail(self._pool.no_generators_error(
                f"{generator.name} {why} before it could sample, {MOST_FAILURES} times in a row. {log_file} ends with: "
                f"{_last_line(log_file)}"))  # fmt: skip
            self._ending.wait()
            return
        log.warning("%s %s; restarting it", generator.name, why)
        self._start(generator)

    def _start(self, generator: _Generator) -> None:
        generator.started, generator.ranks = time.monotonic(), []
        generator.has_joined = generator.was_ready = False
        arguments = ["--trainer", self._address, "--name", generator.name]
        if self._device:
            arguments += ["--device", self._device]
        size = self._config.tensor
        on_host = [other.name for other in self._generators if other.host == generator.host]
        # The training ranks use the first GPUs of their host.
        training_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if generator.host == LOCAL else 0
        first = training_ranks + size * on_host.index(generator.name)
        group = Group(arguments, size, self._config.threads, size * len(on_host), first)
        logs = [self._log(generator, rank) for rank in range(size)]
        with ExitStack() as opened:
            outputs = [opened.enter_context(log.open("ab")) for log in logs]
            if generator.host == LOCAL:
                generator.ranks = start_ranks(group, self._key.hex(), outputs)
            else:
                generator.ranks = [
                    start_stand_in(generator.host, self._config.host, group, self._key.hex(), logs, outputs[0])
                ]

    def _log(self, generator: _Generator, rank: int) -> Path:
        return self._logs / (f"{generator.name}.log" if rank == 0 else f"{generator.name}_rank_{rank}.log")


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
