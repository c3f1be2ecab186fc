"""The heartbeat of a run's actor in the run's folder: what it is doing, what it waits for, and its progress.

Actors are the ranks that train, `rank_0` …, and other processes such as `generator_0`.
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
"""Seconds between two heartbeats within a phase."""
BYTES = 4096
"""Size of a heartbeat, padded with blanks: one page, one block."""
MESSAGE = 200
"""Maximum number of characters of a message."""
STACKS_SIGNAL = signal.SIGUSR2
"""Signal upon which a process writes its stacks."""


class Heartbeat:
    """`logs/heartbeat_….json` of one actor, written when a phase begins and every `seconds`. A context manager.

    The file is removed when the actor ends, except after an error, which is recorded in it. Within the context,
    STACKS_SIGNAL makes the process write all threads' stacks to `logs/stacks_NAME.txt` at any time. An actor that is
    not a rank enters it after the run's folder was claimed, which removes the files of killed processes:

        timeline = Timeline()
        with Heartbeat(run, "generator_0", timeline):
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
        self._thread = threading.Thread(target=self._beat_on, name="heartbeat", daemon=True)
        self._listener = _Listener(timeline)

    def __enter__(self) -> Heartbeat:
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
        # In append mode: stacks that an earlier attempt left there explain why it ended.
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
            # An actor that has ended is not stuck, so its heartbeat is removed.
            self.path.unlink(missing_ok=True)
        # Requested stacks have been read by now; those from the watchdog of an earlier attempt are not removed.
        self._stacks.close()
        with suppress(OSError):
            os.truncate(self._stacks_path, self._stacks_size)
            if not self._stacks_size:
                self._stacks_path.unlink()
            self.path.parent.rmdir()  # if it is empty

    def end(self, why: str) -> None:
        """Records in the heartbeat why the actor ends."""
        self._end = why.splitlines()[0]
        self._beat()

    def _beat_on(self) -> None:
        while not self._ended.wait(self.seconds):
            self._collectives = collectives()
            self._beat()
            with suppress(OSError):
                # On a shared file system, writes are visible to other machines only after this.
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
            # Overwritten in place, which takes microseconds and works on a full disk.
            with suppress(OSError):
                os.pwrite(self._file, written.ljust(BYTES).encode(), 0)


class _Listener(logging.Handler):
    """Keeps the last log message."""

    def __init__(self, timeline: Timeline):
        super().__init__()
        self.timeline = timeline

    def emit(self, record: logging.LogRecord) -> None:
        self.timeline.message = record.getMessage().partition("\n")[0]


def heartbeat_path(run: Path, name: str) -> Path:
    """The path of an actor's heartbeat; a rank's is named by its number."""
    return run / "logs" / f"heartbeat_{name.removeprefix('rank_')}.json"


def stacks_path(run: Path, name: str) -> Path:
    """The path of all threads' Python stacks of an actor, written on request."""
    return run / "logs" / f"stacks_{name}.txt"


def remove_heartbeats(run: Path) -> None:
    """Removes the heartbeats of killed processes."""
    for path in run.glob("logs/heartbeat_*.json"):
        path.unlink(missing_ok=True)


def host() -> str:
    """The scope of this process's PIDs: the host, and the container within it."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def start_ticks(pid: int) -> int:
    """When a process started, which distinguishes it from a later one with the same PID; 0 if unknown."""
    return int(stat_fields(pid)[19]) if stat_fields(pid) else 0


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def runs_here(pid: int, its_host: str) -> bool:
    """Whether a process whose `host()` is `its_host` runs on this host, neither stopped nor ended."""
    fields = stat_fields(pid) if its_host == host() else []
    return bool(fields) and fields[0] not in "TtZX"


def collectives() -> dict[str, Any]:
    """For each process group, the number of collectives that this rank has begun in it, and the group's ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {}
    known: Any = dist.distributed_c10d._world
    begun: dict[str, Any] = {}
    for group in list(known.pg_map):
        # Raised for a group that is being created or destroyed, or whose backend has no counter.
        with suppress(RuntimeError, ValueError, KeyError):
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) > 1:
                begun[known.pg_names[group]] = [group._get_sequence_number_for_group(), ranks]
    return begun
