"""What an actor of a run says of itself in the run's folder: what it does, whom it waits for, and that it moves.

Actors are the ranks that train, `rank_0` …, and the processes beside them, such as `generator_0`.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.observe.logs import log
from lockstep.observe.timeline import Timeline

BEAT = 5.0
"""Seconds between two signs of life within a phase."""
BYTES = 4096
"""Of a sign of life, with the blanks that fill it up: one page, one block."""
MESSAGE = 200
"""Characters of a message that are kept."""
STACKS_SIGNAL = signal.SIGUSR2
"""Asks a process for its stacks."""


class SignOfLife:
    """`logs/heartbeat_….json` of one actor, written where a phase begins and every `seconds`. A context manager.

    It is gone once the actor has ended; an error that ended it is kept in it. While it is open STACKS_SIGNAL has all
    threads' stacks written to `logs/stacks_NAME.txt`, whatever the process is doing. An actor that is no rank opens it
    after the run's folder was claimed, which removes those of processes that were killed:

        timeline = Timeline()
        with SignOfLife(run, "generator_0", timeline):
            with timeline.span("idle", waits_for="requests of rank_0"):
                ...
    """

    def __init__(self, run: Path, name: str, timeline: Timeline, seconds: float = BEAT):
        self.run, self.name, self.timeline, self.seconds = run, name, timeline, seconds
        self.path, self._stacks_path = heartbeat_path(run, name), stacks_path(run, name)
        self._collectives: dict[str, Any] = {}
        self._moved, self._moves = time.time(), (0, 0)
        self._end = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="sign of life", daemon=True)
        self._listener = _Listener(timeline)

    def __enter__(self) -> SignOfLife:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._who = {
            "name": self.name,
            "pid": os.getpid(),
            "started": start_ticks(os.getpid()),
            "host": host(),
            "thread": threading.get_ident(),
            "interval": self.seconds,
        }
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        # Appended to: what an earlier attempt has left there explains why it ended.
        self._stacks = self._stacks_path.open("a")
        self._stacks_size = self._stacks.tell()
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        log.addHandler(self._listener)
        self._beat()
        self.timeline.changed = self._beat
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self._ended.set()
        self._thread.join()
        self.timeline.changed = lambda: None
        log.removeHandler(self._listener)
        faulthandler.unregister(STACKS_SIGNAL)
        if error is not None:
            self.end(f"{type(error).__name__}: {error}")
        os.close(self._file)
        if error is None:
            # An actor that has ended has not stopped: what it would stand still at is gone.
            self.path.unlink(missing_ok=True)
        # What was asked for was read then; what the watchdog of an earlier attempt wrote stays.
        self._stacks.close()
        with suppress(OSError):
            os.truncate(self._stacks_path, self._stacks_size)
            if not self._stacks_size:
                self._stacks_path.unlink()
            self.path.parent.rmdir()  # where nothing else is in it

    def end(self, why: str) -> None:
        """Says why the actor ends; what is read of it from now on."""
        self._end = why.splitlines()[0]
        self._beat()

    def _beat_on(self) -> None:
        while not self._ended.wait(self.seconds):
            self._collectives = collectives()
            self._beat()
            with suppress(OSError):
                # A file system of several machines shows them what one has written only then.
                os.fsync(self._file)

    def _beat(self) -> None:
        line, now = self.timeline, time.time()
        with self._lock:
            moves = line.progress, line.work
            if moves != self._moves:
                self._moves, self._moved = moves, now
            content = self._who | {
                "step": line.step,
                "phase": line.phase,
                "waits_for": (line.awaited() or line.waits_for)[:MESSAGE],
                "patience": line.patience,
                "progress": line.progress,
                "work": line.work,
                "moved": self._moved,
                "time": now,
                "message": line.message[:MESSAGE],
                "ended": self._end[:MESSAGE],
                "collectives": self._collectives,
            }
            written = json.dumps(content)
            if len(written) > BYTES:
                written = json.dumps(content | {"collectives": {}, "message": ""})
            # Over the old one, in place: it takes microseconds, and a full disk does not make an actor look dead.
            with suppress(OSError):
                os.pwrite(self._file, written.ljust(BYTES).encode(), 0)


class _Listener(logging.Handler):
    """Keeps what was logged last."""

    def __init__(self, timeline: Timeline):
        super().__init__()
        self.timeline = timeline

    def emit(self, record: logging.LogRecord) -> None:
        self.timeline.message = record.getMessage().partition("\n")[0]


def heartbeat_path(run: Path, name: str) -> Path:
    """A rank's goes by its number."""
    return run / "logs" / f"heartbeat_{name.removeprefix('rank_')}.json"


def stacks_path(run: Path, name: str) -> Path:
    """All threads' Python stacks of an actor, where somebody has asked for them."""
    return run / "logs" / f"stacks_{name}.txt"


def forget_signs(run: Path) -> None:
    """Removes those of processes that ended without being able to."""
    for path in run.glob("logs/heartbeat_*.json"):
        path.unlink(missing_ok=True)


def host() -> str:
    """Where process numbers mean what they mean here: the host, and within it the container."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def start_ticks(pid: int) -> int:
    """When a process began, which tells it from a later one of the same number; 0 where the kernel does not tell."""
    return int(stat_fields(pid)[19]) if stat_fields(pid) else 0


def stat_fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def runs_here(pid: int, place: str) -> bool:
    """Whether a process of `place`, as `host` says it there, is one of this host, neither stopped nor gone."""
    fields = stat_fields(pid) if place == host() else []
    return bool(fields) and fields[0] not in "TtZX"


def collectives() -> dict[str, Any]:
    """Of each process group: how many collectives this rank has begun in it, and the group's ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {}
    known: Any = dist.distributed_c10d._world
    found: dict[str, Any] = {}
    for group in list(known.pg_map):
        # One that is being made or ended just now, or whose backend does not count.
        with suppress(RuntimeError, ValueError, KeyError):
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) > 1:
                found[known.pg_names[group]] = [group._get_sequence_number_for_group(), ranks]
    return found
