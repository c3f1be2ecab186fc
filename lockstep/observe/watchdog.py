"""Detects a run that hangs: reports which actor stopped in which step, saves stacks and collectives, ends the run."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.observe.actors import BY_WATCHDOG, Actor, describe_stopped, held_up_by, read_actor, read_actors, table
from lockstep.observe.heartbeat import Heartbeat, heartbeat_path, stacks_path
from lockstep.observe.logs import log

EXIT_CODE = 124
"""Exit code of a run that the watchdog ended, as with timeout(1)."""
VERDICT = "stopped"
"""A file in `logs/` by which rank 0 informs the others; removed before a run starts again."""

LEFT = "left by the watchdog of process"
"""The first line of the watchdog's stacks, followed by the PID."""


@dataclass
class _Seen:
    """An actor's last heartbeat, and this process's clock when it last changed."""

    actor: Actor
    progressed: float
    answered: float


def interval(seconds: float) -> float:
    """Seconds between heartbeats, and between checks of them, for a watchdog limit of `seconds`."""
    return min(5.0, max(0.05, seconds / 10)) if seconds else 5.0


class Watchdog:
    """A thread that watches the run's actors. A context manager.

    Rank 0 reads all actors' heartbeats (`Heartbeat`). An actor counts as stopped if it has made no progress for
    `seconds` plus its phase's time limit, or has not responded for `seconds`, unless the actor it ultimately waits for
    makes progress. Of the stopped actors, those that hold up the others are named. Ranks other than 0 only check
    whether rank 0's process still responds. Every rank then writes its threads' stacks and its last collectives to
    `logs/`, and exits with EXIT_CODE, upon which torchrun restarts them.
    """

    def __init__(self, heartbeat: Heartbeat, rank: int, ranks: int, seconds: float):
        self.heartbeat, self.rank, self.ranks, self.seconds = heartbeat, rank, ranks, seconds
        self.run = heartbeat.run
        self.interval = interval(seconds)
        self._seen: dict[str, _Seen] = {}
        self._looked = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.seconds:
            self._looked = time.monotonic()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.seconds:
            self._ended.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self.interval):
            self._look()
            stopped = self._stopped()
            if stopped or self._verdict.is_file():
                self._end_run(stopped)

    def _look(self) -> None:
        """Reads heartbeats. Ages are measured by this process's clock, since clocks differ between machines."""
        now = time.monotonic()
        if (slept := now - self._looked) > 3 * self.interval:
            # This process was stopped, or the machine slept: that time does not count as the others' silence.
            for seen in self._seen.values():
                seen.progressed, seen.answered = seen.progressed + slept, seen.answered + slept
        self._looked = now
        if self.rank == 0:
            actors = read_actors(self.run)
        else:
            first = read_actor(heartbeat_path(self.run, "rank_0"))
            actors = {first.name: first} if first else {}
        for name, actor in actors.items():
            seen = self._seen.setdefault(name, _Seen(actor, now, now))
            if (actor.progress, actor.work) != (seen.actor.progress, seen.actor.work):
                seen.progressed = now
            if actor.time != seen.actor.time:
                seen.answered = now
            seen.actor = actor
        for name in list(self._seen):
            # An actor whose heartbeat cannot be read at the moment keeps its age.
            if name not in actors and not heartbeat_path(self.run, name).is_file():
                del self._seen[name]

    def _actors(self) -> list[Actor]:
        now = time.monotonic()
        for seen in self._seen.values():
            seen.actor.still, seen.actor.silent = now - seen.progressed, now - seen.answered
        return [seen.actor for seen in self._seen.values() if not seen.actor.ended]

    def _stopped(self) -> list[Actor]:
        """The actors that have stopped and hold up the others; empty while the run makes progress."""
        actors = self._actors()
        if self.rank != 0:
            return [actor for actor in actors if actor.silent > self.seconds]
        stuck = {actor.name: actor for actor in actors if self._stands_still(actor)}
        # A stopped generator that no rank waits for is no problem: other generators do its work.
        ranks = [actor for actor in stuck.values() if actor.is_rank]
        return [actor for actor in held_up_by(ranks, actors) if actor.name in stuck]

    def _stands_still(self, actor: Actor) -> bool:
        return actor.silent > self.seconds or actor.still > self.seconds + actor.patience

    def _end_run(self, stopped: Sequence[Actor]) -> None:
        words = "; ".join(map(describe_stopped, stopped))
        if stopped:
            where = ", ".join(str(stacks_path(self.run, actor.name)) for actor in stopped)
            others = f"\nwho waits for whom:\n{table(self._actors())}" if len(self._seen) > 1 else ""
            message = f"{words}. See {where}; this ends the run with exit code {EXIT_CODE}, and --resume continues it"
            log.critical("%s%s", message, others)
            if self.rank == 1:
                # Rank 0, whose log is the terminal's, is the one that stopped. One of the others is enough.
                print(f"CRITICAL: rank 1: {message}", file=sys.stderr, flush=True)
        with suppress(OSError):  # the run ends on a full disk, too
            if self.ranks > 1 and self.rank == 0:
                # The other ranks read it at their next check, and write their stacks before torchrun ends them.
                self._verdict.write_text(words)
            self.heartbeat.end(BY_WATCHDOG + (words or self._verdict.read_text()))
            dump_stacks(self.run, self.rank)
        time.sleep(4 * self.interval)
        os._exit(EXIT_CODE)

    @property
    def _verdict(self) -> Path:
        return self.run / "logs" / VERDICT


def dump_stacks(run: Path, rank: int) -> None:
    """Writes `stacks_rank_N.txt` (all threads' Python stacks) and, if there is a Flight Recorder, its
    `collectives_rank_N.json`."""
    path = stacks_path(run, f"rank_{rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(f"{LEFT} {os.getpid()}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    collectives = _collectives()
    if collectives:
        (path.parent / f"collectives_rank_{rank}.json").write_bytes(collectives)


def _collectives() -> bytes:
    """The last collectives as JSON, NCCL's if there are any, else gloo's; empty without torch.distributed."""
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
