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
    has_joined: bool = False
    was_ready: bool = False
    failures: int = 0


class LocalGenerators:
    """`config.generators` generators as processes of this host. A context manager; leaving it leaves none behind."""

    def __init__(self, config: ActorsConfig, fleet: Fleet, address: str, key: bytes, device: str, logs: Path):
        """logs: the folder for their output."""
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
        try:
            for place in self._places:
                self._start(place)
            while not self._ending.wait(GLANCE):
                for place in self._places:
                    self._look(place)
        except OSError as error:
            problem = f"generators cannot be started: {error}; --resume continues from the newest checkpoint"
            self._fleet.fail(RunStopped(problem, exit_code=1))
            self._ending.wait()
        until = time.monotonic() + END_SECONDS
        for rank in [rank for place in self._places for rank in place.ranks]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, until - time.monotonic()))
        for place in self._places:
            _kill(place)

    def _look(self, place: _Place) -> None:
        remote = self._fleet.remote(place.name)
        place.has_joined |= remote is not None
        place.was_ready |= place.name in self._fleet.ready
        ended = {rank: process.returncode for rank, process in enumerate(place.ranks) if process.poll() is not None}
        late = not place.was_ready and time.monotonic() - place.started > self._config.start_seconds
        if not ended and not late and (remote is not None or not place.has_joined):
            return
        # Given up by the fleet, or a rank has ended, or it never came: whatever is left of it goes.
        why = _said(ended) if ended else "was not ready in time" if late else "was given up"
        if remote is not None:
            self._fleet.lost(remote, f"it {why}")
        _kill(place)
        if remote is not None:
            remote.close()
        place.failures = 0 if place.was_ready else place.failures + 1
        if place.failures >= MOST_FAILURES:
            own = self._log(place, min(ended, default=0))
            self._fleet.fail(RunStopped(
                f"{place.name} {why} before it could sample, {MOST_FAILURES} times over. {own} ends with: "
                f"{_last_line(own)}. --resume continues from the newest checkpoint", exit_code=1))  # fmt: skip
            self._ending.wait()
            return
        log.warning("%s %s; it is started again", place.name, why)
        self._start(place)

    def _start(self, place: _Place) -> None:
        place.started, place.ranks = time.monotonic(), []
        place.has_joined = place.was_ready = False
        size, port = self._config.tensor, _free_port()
        for rank in range(size):
            command = [sys.executable, "-m", "lockstep", "generator", "--trainer", self._address, "--key", "-",
                       "--name", place.name, "--parent", str(os.getpid())]  # fmt: skip
            if self._device:
                command += ["--device", self._device]
            with self._log(place, rank).open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=self._environment(rank, size, port),
                    # A Ctrl-C in the terminal is for the trainer, which ends them when it has ended its step.
                    start_new_session=True,
                )
            place.ranks.append(process)
            assert process.stdin is not None
            # By a pipe, so that no file with it is left behind by a trainer that is killed.
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(self._key.hex().encode())

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


def _said(ended: Mapping[int, int]) -> str:
    """How ranks have ended, by their return codes."""
    rank, code = min(ended.items())
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return how if rank == 0 else f"has lost rank {rank}, which {how}"


def _last_line(file: Path) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "nothing"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
