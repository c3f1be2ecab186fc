"""Names the rank and step that stopped, keeps what there is to see of it, and ends the run."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.observe.logs import log
from lockstep.observe.timeline import Timeline

EXIT_CODE = 124
"""Of a run that the watchdog ended, as of timeout(1)."""
HEARTBEAT_BYTES = 160
VERDICT = "stopped"
"""In `logs/`, from rank 0 to the others; gone before a run begins again."""


@dataclass
class Heartbeat:
    """A rank's last sign of life, and this process's clock when it last changed."""

    content: dict[str, Any]
    progressed: float
    answered: float


class Watchdog:
    """A thread beside the training loop. A context manager.

    Every rank writes what it begins into `logs/heartbeat_N.json`, and rank 0 reads them all. A rank whose progress
    has stood still for `seconds` has stopped; as the others soon wait for it, the one that is furthest behind is the
    one that is named. The others only look whether rank 0's own thread still answers. Every rank then writes its
    threads' stacks and its last collectives into `logs/`, and ends with EXIT_CODE, whereupon torchrun starts them anew.
    """

    def __init__(self, timeline: Timeline, run: Path, rank: int, ranks: int, seconds: float):
        self.timeline, self.rank, self.ranks, self.seconds = timeline, rank, ranks, seconds
        self.logs = run / "logs"
        self.interval = min(5.0, max(0.05, seconds / 10))
        self._watched = range(ranks) if rank == 0 else range(1)
        self._seen: dict[int, Heartbeat] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.seconds:
            if self.ranks > 1:
                self.logs.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._heartbeat(self.rank), os.O_WRONLY | os.O_CREAT)
                self._beat()
                self.timeline.changed = self._beat
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.seconds:
            self._ended.set()
            self._thread.join()
            if self.ranks > 1:
                self.timeline.changed = lambda: None
                os.close(self._file)
                # A rank that has ended has not stopped: what it would stand still at is gone.
                self._heartbeat(self.rank).unlink(missing_ok=True)

    def _watch(self) -> None:
        while not self._ended.wait(self.interval):
            if self.ranks > 1:
                self._beat()
                # A file system of several machines shows them what one has written only then.
                os.fsync(self._file)
            self._look()
            stopped = self._stopped()
            if stopped or self._verdict.is_file():
                self._end_run(stopped)

    def _state(self) -> dict[str, Any]:
        line = self.timeline
        return {"step": line.step, "phase": line.phase, "progress": line.progress, "time": time.time()}

    def _beat(self) -> None:
        # Over the old one, in place: it takes microseconds, and a full disk does not make a rank look dead.
        os.pwrite(self._file, json.dumps(self._state()).ljust(HEARTBEAT_BYTES).encode(), 0)

    def _look(self) -> None:
        """Ages are taken by this process's clock: those of several machines disagree."""
        now = time.monotonic()
        for rank in self._watched:
            try:
                content = self._state() if rank == self.rank else json.loads(self._heartbeat(rank).read_text())
            except FileNotFoundError:
                self._seen.pop(rank, None)
                continue
            except (OSError, ValueError):
                # Not begun, or caught halfway: its age stands.
                continue
            seen = self._seen.setdefault(rank, Heartbeat(content, now, now))
            if content["progress"] != seen.content["progress"]:
                seen.progressed = now
            if content["time"] != seen.content["time"]:
                seen.answered = now
            seen.content = content

    def _stopped(self) -> list[int]:
        """The ranks furthest behind, once one of them has stood still for too long."""
        now = time.monotonic()
        if self.rank != 0:
            return [rank for rank, seen in self._seen.items() if now - seen.answered > self.seconds]
        if not any(now - seen.progressed > self.seconds for seen in self._seen.values()):
            return []
        least = min(seen.content["progress"] for seen in self._seen.values())
        return [rank for rank, seen in self._seen.items() if seen.content["progress"] == least]

    def _end_run(self, stopped: Iterable[int]) -> None:
        for rank in stopped:
            seen = self._seen[rank]
            silent = time.monotonic() - seen.answered > 3 * self.interval
            log.critical(
                "rank %d stopped in step %d, in %s: no progress for %.1f s%s. See %s/stacks_rank_%d.txt; "
                "this ends the run with exit code %d, and --resume continues it",
                rank,
                seen.content["step"],
                seen.content["phase"],
                time.monotonic() - seen.progressed,
                ", and its process does not answer" if silent else "",
                self.logs,
                rank,
                EXIT_CODE,
            )
        if self.ranks > 1 and self.rank == 0:
            # Found by the others at their next look, so that they leave their stacks too before torchrun ends them.
            self._verdict.touch()
        dump_stacks(self.logs, self.rank)
        time.sleep(4 * self.interval)
        os._exit(EXIT_CODE)

    def _heartbeat(self, rank: int) -> Path:
        return self.logs / f"heartbeat_{rank}.json"

    @property
    def _verdict(self) -> Path:
        return self.logs / VERDICT


def dump_stacks(folder: Path, rank: int) -> None:
    """`stacks_rank_N.txt`: all threads' Python stacks; `collectives_rank_N.json`: the Flight Recorder's, if any."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"stacks_rank_{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    collectives = _collectives()
    if collectives:
        (folder / f"collectives_rank_{rank}.json").write_bytes(collectives)


def _collectives() -> bytes:
    """The last collectives as JSON, NCCL's where there are any, else gloo's; empty without torch.distributed."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return b""
    c10d = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dumped = getattr(c10d, name)() if hasattr(c10d, name) else b""
        data = dumped.encode() if isinstance(dumped, str) else dumped
        if data and json.loads(data).get("entries"):
            return bytes(data)
    return b""
