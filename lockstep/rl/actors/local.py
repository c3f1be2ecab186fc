"""Generators that the run starts on its own host, and starts again when they die."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config import ActorsConfig
from lockstep.errors import RunStopped
from lockstep.observe import log
from lockstep.rl.actors.fleet import Fleet

GLANCE = 0.1
"""Seconds between two looks at the processes."""
MOST_FAILURES = 3
"""Starts in a row that may fail before a generator is ready."""
END_SECONDS = 5.0
"""What processes are given to end before they are killed."""
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK")


@dataclass
class _Place:
    """A generator of the run, whichever processes it has at the time."""

    name: str
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: float = 0.0
    was_ready: bool = False
    failures: int = 0


class LocalGenerators:
    """`config.generators` generators as processes of this host. A context manager; leaving it leaves none behind."""

    def __init__(self, config: ActorsConfig, fleet: Fleet, address: str, key: Path, device: str, logs: Path):
        """key: the file with the run's key. logs: the folder for their output."""
        self._config, self._fleet, self._address = config, fleet, address
        self._key, self._device, self._logs = key, device, logs
        self._places = [_Place(f"generator_{number}") for number in range(config.generators)]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="generators", daemon=True)

    def __enter__(self) -> LocalGenerators:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._fleet.required |= {place.name for place in self._places}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def processes(self) -> dict[str, list[int]]:
        """The process of each rank, by the generators' names."""
        return {place.name: [rank.pid for rank in place.ranks] for place in self._places}

    def _watch(self) -> None:
        # They die with the thread that has started them, which is this one.
        for place in self._places:
            self._start(place)
        while not self._ending.wait(GLANCE):
            for place in self._places:
                self._look(place)
        until = time.monotonic() + END_SECONDS
        for rank in [rank for place in self._places for rank in place.ranks]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, until - time.monotonic()))
        for place in self._places:
            _kill(place)

    def _look(self, place: _Place) -> None:
        ready = place.name in self._fleet.ready
        place.was_ready |= ready
        ended = [rank.returncode for rank in place.ranks if rank.poll() is not None]
        late = not place.was_ready and time.monotonic() - place.started > self._config.start_seconds
        if not ended and not late and (ready or not place.was_ready):
            return
        # Given up by the fleet, or a rank has ended, or it never came: whatever is left of it goes.
        _kill(place)
        if remote := self._fleet.leave(place.name):
            remote.close()
        place.failures = 0 if place.was_ready else place.failures + 1
        if place.failures >= MOST_FAILURES:
            why = "was not ready in time" if late else f"ended with exit code {ended[0] if ended else '?'}"
            self._fleet.fail(RunStopped(
                f"{place.name} {why}, {MOST_FAILURES} times over; the end of {self._log(place, 0)} says why. --resume "
                "continues from the newest checkpoint", exit_code=1))  # fmt: skip
            self._ending.wait()
            return
        log.warning("%s is started again", place.name)
        self._start(place)

    def _start(self, place: _Place) -> None:
        place.started, place.was_ready, place.ranks = time.monotonic(), False, []
        size, port = self._config.tensor, _free_port()
        for rank in range(size):
            command = [sys.executable, "-m", "lockstep", "generator", "--trainer", self._address, "--key",
                       str(self._key), "--name", place.name, "--parent", str(os.getpid())]  # fmt: skip
            if self._device:
                command += ["--device", self._device]
            with self._log(place, rank).open("ab") as output:
                place.ranks.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=self._environment(rank, size, port),
                        # A Ctrl-C in the terminal is for the trainer, which ends them when it has ended its step.
                        start_new_session=True,
                    )
                )

    def _log(self, place: _Place, rank: int) -> Path:
        return self._logs / (f"{place.name}.log" if rank == 0 else f"{place.name}_rank_{rank}.log")

    def _environment(self, rank: int, size: int, port: int) -> Mapping[str, str]:
        # The trainer's own torchrun is none of theirs.
        kept = {k: v for k, v in os.environ.items() if k not in OWN and not k.startswith("TORCHELASTIC_")}
        processes = self._config.generators * size
        threads = self._config.threads or max(1, len(os.sched_getaffinity(0)) // processes)
        kept["OMP_NUM_THREADS"] = str(threads)
        if size > 1:
            kept |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        return kept


def _kill(place: _Place) -> None:
    for rank in place.ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
