"""Which of a run's actors waits for which, and messages that say so, for `lockstep why` and the watchdog."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import one_line
from lockstep.observe.heartbeat import STACKS_SIGNAL, host, stat_fields

Process = Literal["running", "stopped", "gone", "elsewhere", "ended"]
"""State of an actor's process: running; stopped by a signal; gone without an error; on another host or in another
container; ended by an error that it reported."""
NAME = re.compile(r"[a-z]{1,40}_[0-9]{1,9}")
LOST = ("Connection closed by peer", "Connection reset by peer", "an exchange of ranks failed", "NCCL error")
"""Parts of the errors that gloo and NCCL raise when a connection is lost because another rank has ended."""
LOST_TRAINER = "Closed: "
"""Prefix of a generator's final message if its trainer has ended."""

GENERATORS = "the generators"
"""What an actor waits for, if it is any of the generators."""
BY_WATCHDOG = "ended by the watchdog: "
"""Prefix of the final message of an actor that the watchdog ended."""


@dataclass
class Actor:
    """An actor's last heartbeat, and the current state of its process."""

    name: str
    pid: int = 0
    started: int = 0
    host: str = ""
    thread: int = 0
    interval: float = 0.0
    step: int = 0
    phase: str = ""
    waits_for: str = ""
    patience: float = 0.0
    progress: int = 0
    work: int = 0
    moved: float = 0.0
    time: float = 0.0
    message: str = ""
    ended: str = ""
    collectives: dict[str, Any] = field(default_factory=dict)
    process: Process = "running"
    still: float = 0.0
    """Seconds without progress."""
    silent: float = 0.0
    """Seconds without a heartbeat."""

    @property
    def title(self) -> str:
        """`rank 0`."""
        return self.name.replace("_", " ")

    @property
    def is_rank(self) -> bool:
        return self.name.startswith("rank_")

    @property
    def answers(self) -> bool:
        return self.process in ("running", "elsewhere") and self.silent <= 3 * max(self.interval, 0.05)

    @property
    def lost(self) -> bool:
        """Whether it can make no more progress."""
        return self.process in ("stopped", "gone", "ended")


def read_actors(run: Path) -> dict[str, Actor]:
    """All actors with a heartbeat in the run's folder, by name; ages are by this machine's clock."""
    now = time.time()
    actors = {}
    for path in run.glob("logs/heartbeat_*.json"):
        actor = read_actor(path)
        if actor is not None:
            actor.still, actor.silent = max(0.0, now - actor.moved), max(0.0, now - actor.time)
            actors[actor.name] = actor
    return dict(sorted(actors.items(), key=lambda item: (not item[1].is_rank, _number(item[0]), item[0])))


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def read_actor(path: Path) -> Actor | None:
    """The actor of a heartbeat file; None if that cannot be read: not written yet, or only partly."""
    for _ in range(3):
        try:
            actor = Actor(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            time.sleep(0.002)
            continue
        actor.process = process_of(actor)
        return actor
    return None


def process_of(actor: Actor) -> Process:
    """The state of the actor's process, as seen from this machine."""
    if actor.ended:
        return "ended"
    if actor.host != host():
        return "elsewhere"
    if not actor.started:  # no /proc here
        return "running" if _exists(actor.pid) else "gone"
    fields = stat_fields(actor.pid)
    if not fields or int(fields[19]) != actor.started or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def catches_stacks_signal(actor: Actor) -> bool:
    """Whether the process has a handler for STACKS_SIGNAL, which would otherwise end it."""
    if actor.process != "running" or not actor.started:
        return False
    try:
        lines = Path(f"/proc/{actor.pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(masks and masks[0] >> (STACKS_SIGNAL - 1) & 1)


def waits(actor: Actor, actors: Iterable[Actor]) -> list[Actor]:
    """The actors that `actor` waits for directly: those it names; else ranks that have begun fewer collectives in a
    shared group; else ranks in an earlier phase."""
    if actor.lost:
        return []
    others = [other for other in actors if other.name != actor.name]
    names = set(NAME.findall(actor.waits_for))
    any_generator = GENERATORS in actor.waits_for
    if named := [other for other in others if other.name in names or (any_generator and not other.is_rank)]:
        return named
    if not actor.is_rank:
        return []
    ranks = [other for other in others if other.is_rank]
    if behind := [other for other in ranks if _is_behind(other, actor)]:
        return behind
    position = actor.step, actor.progress
    return [r for r in ranks if (r.step, r.progress) < position and not _is_behind(actor, r)]


def _is_behind(other: Actor, actor: Actor) -> bool:
    pairs = [(actor.collectives[g], other.collectives[g]) for g in actor.collectives.keys() & other.collectives.keys()]
    return any(mine[0] > theirs[0] for mine, theirs in pairs if mine[1] == theirs[1])


def held_up_by(waiting: Sequence[Actor], actors: Sequence[Actor]) -> list[Actor]:
    """The actors at the ends of the chains of waits that begin at `waiting`: the cause among those that are lost, or
    else those furthest behind."""
    if not waiting:
        return []
    seen: dict[str, Actor] = {}
    ends: list[Actor] = []
    pending = list(waiting)
    while pending:
        actor = pending.pop()
        if actor.name not in seen:
            seen[actor.name] = actor
            following = waits(actor, actors)
            pending += following
            if not following:
                ends.append(actor)
    if not ends:
        return _ring(list(seen.values()))
    if lost := [actor for actor in ends if actor.lost]:
        return _first_lost(lost)
    # Progress counters are comparable among ranks only.
    least = min((a.step, a.progress if a.is_rank else 0) for a in ends)
    return [a for a in ends if (a.step, a.progress if a.is_rank else 0) == least]


def _ring(actors: list[Actor]) -> list[Actor]:
    """The actors that wait for each other in a cycle, without those that only wait for the cycle."""
    awaited = {other.name for actor in actors for other in waits(actor, actors)}
    remaining = [actor for actor in actors if actor.name in awaited]
    return remaining if len(remaining) in (0, len(actors)) else _ring(remaining)


def _first_lost(lost: list[Actor]) -> list[Actor]:
    """The most likely cause: a process that is stopped, or that the watchdog named; else the first error that is not
    about a lost connection; else a process that ended without an error, a rank rather than a generator, which ends with
    its trainer; else the first error."""
    named = verdict(lost)
    for kind in (
        [a for a in lost if a.process == "stopped"],
        [a for a in lost if f"{a.title} stopped in" in named],
        sorted((a for a in lost if a.ended and not _is_about_others(a)), key=lambda a: a.time)[:1],
        [a for a in lost if a.process == "gone" and a.is_rank],
        [a for a in lost if a.process == "gone"],
    ):
        if kind:
            return kind
    return sorted(lost, key=lambda a: a.time)[:1]


def _is_about_others(actor: Actor) -> bool:
    return actor.ended.startswith(LOST_TRAINER) or any(part in actor.ended for part in (*LOST, BY_WATCHDOG))


def verdict(actors: Iterable[Actor]) -> str:
    """The watchdog's message, which names the actors that stopped; empty if it has not ended the run."""
    return next((a.ended for a in actors if a.ended.startswith(BY_WATCHDOG)), "")


def describe_stopped(actor: Actor) -> str:
    """`rank 1 stopped in step 3, in forward: no progress for 480.2 s, and …`."""
    return describe_position(actor, "stopped") + describe_process(actor)


def describe_position(actor: Actor, does: str) -> str:
    """`rank 1 is in step 3, in forward: no progress for 12.0 s`, if `does` is "is"."""
    waits_for = f", waiting for {actor.waits_for}" if actor.waits_for else ""
    return (
        f"{actor.title} {does} in step {actor.step}, in {actor.phase}{waits_for}: no progress for {actor.still:.1f} s"
    )


def describe_process(actor: Actor) -> str:
    """The state of the process, as the end of a sentence; empty if it responds."""
    if actor.process == "stopped":
        return (
            f", and its process {actor.pid} does not answer: a signal has stopped it (kill -CONT {actor.pid} lets it "
            "continue)"
        )
    if actor.process == "gone":
        return f", and its process {actor.pid} is gone: it was killed (check dmesg for an out-of-memory kill)"
    if not actor.answers:
        return f", and its process {actor.pid} has not answered for {actor.silent:.1f} s"
    return ""


COLUMNS = ("actor", "process", "step", "phase", "waits for", "no progress", "last message")


def table(actors: Sequence[Actor]) -> str:
    """A table with one line per actor."""
    rows = [COLUMNS, *(_row(actor, actors) for actor in actors)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _row(actor: Actor, actors: Sequence[Actor]) -> tuple[str, ...]:
    process = f"{actor.pid} {actor.process}"
    if actor.process == "elsewhere":
        process = f"{actor.pid} on {actor.host.split(' ')[0]}, last heard {actor.silent:.0f} s ago"
    elif not actor.lost and not actor.answers:
        process += f", silent for {actor.silent:.0f} s"
    return (
        actor.title, process, str(actor.step), actor.phase, describe_wait(actor, actors) or "-",
        f"{actor.still:.1f} s", one_line(actor.ended or actor.message, 80) or "-",
    )  # fmt: skip


def describe_wait(actor: Actor, actors: Sequence[Actor]) -> str:
    """What the actor reports to wait for, or else the actors that `waits` infers."""
    return actor.waits_for or ", ".join(other.title for other in waits(actor, actors))
