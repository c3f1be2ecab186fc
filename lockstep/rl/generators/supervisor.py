"""Generators that the run starts, on its own host or through Monarch on others, and restarts when they die."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config import ActorsConfig
from lockstep.config.actors import LOCAL
from lockstep.observe import log
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.ranks import Group, end_ranks, start_ranks, start_stand_in

GLANCE = 0.1
"""Seconds between checks of the processes."""
MOST_FAILURES = 3
"""After this many starts in a row without becoming ready, the run ends."""
END_SECONDS = 5.0
"""Seconds that processes get to end before they are killed."""


@dataclass
class _Place:
    """A generator of the run, whichever processes it currently has."""

    name: str
    host: str
    """LOCAL, or the address of the Monarch worker that starts it."""
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: float = 0.0
    has_joined: bool = False
    was_ready: bool = False
    failures: int = 0

    def ended(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended."""
        codes = {rank: process.poll() for rank, process in enumerate(self.ranks)}
        return {rank: code for rank, code in codes.items() if code is not None}


class Supervisor:
    """`config.generators` generators on `config.hosts`. A context manager; leaving it leaves none behind."""

    def __init__(self, config: ActorsConfig, pool: GeneratorPool, address: str, key: bytes, device: str, logs: Path):
        """logs: the folder for their output."""
        self._config, self._pool, self._address = config, pool, address
        self._key, self._device, self._logs = key, device, logs
        hosts = config.hosts or [LOCAL]
        names = [f"generator_{number}" for number in range(config.generators)]
        self._places = [_Place(name, host) for name, host in zip(names, itertools.cycle(hosts))]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="generators", daemon=True)

    def __enter__(self) -> Supervisor:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._pool.required |= {place.name for place in self._places}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.start_no_more()
        self._thread.join()

    def start_no_more(self) -> None:
        """Generators that end from here on are not restarted: call it before telling them to end."""
        self._ending.set()

    def processes(self) -> dict[str, list[int]]:
        """The process id of each rank, by generator name."""
        return {place.name: [rank.pid for rank in place.ranks] for place in self._places}

    def _watch(self) -> None:
        # They die with the thread that started them, which is this one.
        try:
            for place in self._places:
                self._start(place)
            while not self._ending.wait(GLANCE):
                for place in self._places:
                    self._look(place)
        except OSError as error:
            self._pool.fail(self._pool.none_left(f"generators cannot be started: {error}"))
            self._ending.wait()
        until = time.monotonic() + END_SECONDS
        for rank in [rank for place in self._places for rank in place.ranks]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, until - time.monotonic()))
        for place in self._places:
            end_ranks(place.ranks)

    def _look(self, place: _Place) -> None:
        if place.name in self._pool.false:
            end_ranks(place.ranks)
            place.ranks = []
            return
        remote = self._pool.remote(place.name)
        place.has_joined |= remote is not None
        place.was_ready |= place.name in self._pool.ready
        ended = place.ended()
        late = not place.was_ready and time.monotonic() - place.started > self._config.start_seconds
        if not ended and not late and (remote is not None or not place.has_joined):
            return
        # Given up by the fleet, or a rank has ended, or it never joined: whatever is left of it is killed.
        if not ended and not late:
            self._ending.wait(GLANCE)  # a process that is killed loses its connections before its end can be seen
            ended = place.ended()
        if self._ending.is_set():
            return
        why = _said(ended) if ended else "was not ready in time" if late else "was given up"
        if remote is not None:
            self._pool.lost(remote, f"it {why}")
        end_ranks(place.ranks)
        if remote is not None:
            remote.close()
        place.failures = 0 if place.was_ready else place.failures + 1
        if place.failures >= MOST_FAILURES:
            own = self._log(place, min(ended, default=0))
            self._pool.fail(self._pool.none_left(
                f"{place.name} {why} before it could sample, {MOST_FAILURES} times in a row. {own} ends with: "
                f"{_last_line(own)}"))  # fmt: skip
            self._ending.wait()
            return
        log.warning("%s %s; restarting it", place.name, why)
        self._start(place)

    def _start(self, place: _Place) -> None:
        place.started, place.ranks = time.monotonic(), []
        place.has_joined = place.was_ready = False
        arguments = ["--trainer", self._address, "--name", place.name]
        if self._device:
            arguments += ["--device", self._device]
        size = self._config.tensor
        there = [each.name for each in self._places if each.host == place.host]
        # The trainer's ranks have the first GPUs of their host.
        trainers = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if place.host == LOCAL else 0
        first = trainers + size * there.index(place.name)
        group = Group(arguments, size, self._config.threads, size * len(there), first)
        logs = [self._log(place, rank) for rank in range(size)]
        with ExitStack() as opened:
            outputs = [opened.enter_context(log.open("ab")) for log in logs]
            if place.host == LOCAL:
                place.ranks = start_ranks(group, self._key.hex(), outputs)
            else:
                place.ranks = [start_stand_in(place.host, self._config.host, group, self._key.hex(), logs, outputs[0])]

    def _log(self, place: _Place, rank: int) -> Path:
        return self._logs / (f"{place.name}.log" if rank == 0 else f"{place.name}_rank_{rank}.log")


def _said(ended: Mapping[int, int]) -> str:
    """How ranks have ended, by their return codes."""
    rank, code = min(ended.items())
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return how if rank == 0 else f"lost rank {rank}, which {how}"


def _last_line(file: Path) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "nothing"
