"""`lockstep why`: what each actor of a run is doing, who waits for whom, and who blocks the run."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config import CONFIG
from lockstep.errors import UserError
from lockstep.observe.actors import (
    Actor,
    catches_stacks_signal,
    describe_position,
    describe_process,
    describe_stopped,
    describe_wait,
    held_up_by,
    read_actors,
    table,
    verdict,
    waits,
)
from lockstep.observe.heartbeat import STACKS_SIGNAL, stacks_path
from lockstep.observe.run_folder import RunFolder
from lockstep.observe.run_lock import LOCK
from lockstep.observe.watchdog import LEFT

ANSWER_SECONDS = 3.0
"""Seconds that a process has to write its stacks."""
FRAMES = 10
"""Maximum number of printed frames of a stack."""
INNERMOST = 2
"""Number of innermost frames that are printed even if they are in an installed package."""
BRIEF = 10.0
"""Seconds without progress that are not reported."""


@dataclass(frozen=True)
class Stack:
    """An actor's stack, innermost frame first, or why it is unknown."""

    frames: list[str] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """The current state of a run."""

    run: Path
    summary: str
    moves: bool
    """Whether the run is making progress or has finished."""
    held_up_by: list[Actor] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)
    stacks: Mapping[str, Stack] = field(default_factory=dict)

    def text(self) -> str:
        lines = [self.summary]
        if self.actors:
            lines += ["", table(self.actors)]
        for actor in self.actors:
            stack = self.stacks[actor.name]
            lines += ["", f"{actor.title}{': ' + stack.note if stack.note else ', innermost call first:'}"]
            lines += [f"  {frame}" for frame in _shown(stack.frames)]
        return "\n".join(lines)

    def as_json(self) -> str:
        return json.dumps(
            {
                "run": str(self.run),
                "summary": self.summary,
                "moves": self.moves,
                "held_up_by": [actor.name for actor in self.held_up_by],
                "actors": [self._plain(actor) for actor in self.actors],
            },
            indent=1,
        )

    def _plain(self, actor: Actor) -> dict[str, object]:
        stack = self.stacks[actor.name]
        return {
            "name": actor.name,
            "process": actor.pid,
            "state": actor.process,
            "host": actor.host.split(" ")[0],
            "step": actor.step,
            "phase": actor.phase,
            "waits_for": describe_wait(actor, self.actors),
            "waits_for_actors": [other.name for other in waits(actor, self.actors)],
            "seconds_without_progress": actor.still,
            "seconds_silent": actor.silent,
            "message": actor.message,
            "ended": actor.ended,
            "stack": stack.frames,
            "stack_said": stack.note,
        }


def why(run: Path) -> Explanation:
    """Explains a run, with the stacks of its processes. Raises UserError if there is no run or no information about it.

    For processes of other users or on other hosts, only their heartbeats are known.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run}: is not a run's folder; give a run's --output folder")
    actors = list(read_actors(run).values())
    if not actors:
        return _without_actors(run)
    stacks = ask_stacks(run, actors)
    blocking = held_up_by(actors, actors)
    moves = not any(a.lost or not a.answers for a in blocking) and any(a.still <= _brief(a) for a in blocking)
    return Explanation(run, _summary(run, blocking, actors, moves), moves, [] if moves else blocking, actors, stacks)


def _without_actors(run: Path) -> Explanation:
    if holder := _starting(run):
        return Explanation(run, f"the run is starting, without a heartbeat yet: {holder} loads the model", True)
    if RunFolder(run).summary.is_file():
        return Explanation(run, "the run has finished all its steps (summary.json)", True)
    raise UserError(
        f"{run}: nothing is known about its processes: it ended, or was killed, before its first step began; start it "
        "again with --resume or --overwrite"
    )


def _starting(run: Path) -> str:
    """The process that has locked the run's folder, by its lock file; empty if it no longer exists."""
    holder = _text(run / LOCK, 0)
    match = re.fullmatch(r"process (\d{1,9}) on (\S+)", holder)
    if match and match[2] == socket.gethostname():
        with suppress(PermissionError):
            try:
                os.kill(int(match[1]), 0)
            except ProcessLookupError:
                return ""
    return holder


def _brief(actor: Actor) -> float:
    return max(BRIEF, 2 * actor.interval)


def _summary(run: Path, blocking: Sequence[Actor], actors: Sequence[Actor], moves: bool) -> str:
    """Who blocks the run, in a sentence."""
    if moves:
        return f"the run is making progress: step {max(actor.step for actor in actors)}"
    limit = _watchdog_seconds(run)
    first = blocking[0]
    if ended := verdict(actors):
        cause = ended
    elif first.ended:
        cause = f"{first.title} ended in step {first.step}, in {first.phase}: {first.ended}"
    elif first.lost or not first.answers or 0 < limit < first.still:
        cause = "; ".join(map(describe_stopped, blocking))
    else:
        cause = "; ".join(f"{describe_position(actor, 'is')}{describe_process(actor)}" for actor in blocking)
    if all(actor.process in ("gone", "ended") for actor in actors):
        return f"the run has ended: {cause}"
    names = {actor.name for actor in blocking}
    waiting = [actor.title for actor in actors if actor.name not in names and not actor.lost and waits(actor, actors)]
    if waiting:
        cause += f"; {_listed(waiting)} {'wait' if waiting[1:] else 'waits'} for it"
    if limit and not first.lost:
        cause += f"; the watchdog ends the run after {limit:g} s without progress"
    return cause


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _watchdog_seconds(run: Path) -> float:
    """The run's `watchdog_seconds`; 0 if it cannot be read."""
    try:
        return float(tomllib.loads((run / CONFIG).read_text())["faults"]["watchdog_seconds"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0.0


def ask_stacks(run: Path, actors: Sequence[Actor]) -> dict[str, Stack]:
    """Every actor's stack, by name: dumped by the process on a signal, or recorded by a watchdog."""
    requested: dict[str, int] = {}
    for actor in actors:
        if catches_stacks_signal(actor):
            size = _size(stacks_path(run, actor.name))
            with suppress(PermissionError, ProcessLookupError):
                os.kill(actor.pid, STACKS_SIGNAL)
                requested[actor.name] = size
    until = time.monotonic() + ANSWER_SECONDS
    return {actor.name: _stack(run, actor, requested.get(actor.name), until) for actor in actors}


def _stack(run: Path, actor: Actor, start: int | None, until: float) -> Stack:
    path = stacks_path(run, actor.name)
    if start is not None:
        frames = _answer(path, start, actor.thread, until)
        return Stack(frames) if frames else Stack(note=f"no answer within {ANSWER_SECONDS:g} s")
    text = _text(path, 0)
    if text.startswith(f"{LEFT} {actor.pid}\n") and (left := frames_of(text, actor.thread)):
        return Stack(left, "the stack that the watchdog recorded, innermost call first:")
    if actor.process == "stopped":
        return Stack(note="a stopped process cannot answer; continue it (SIGCONT) and try again")
    if actor.process in ("gone", "ended"):
        return Stack(note="its process has ended")
    if actor.process == "elsewhere":
        return Stack(note=f"run this on its host: lockstep why {run}")
    return Stack(note="no permission to signal it; run this as its user")


def _answer(path: Path, start: int, thread: int, until: float) -> list[str]:
    """The frames that a process writes after byte `start` of the file; empty if it does not answer."""
    before = -1
    while time.monotonic() < until:
        size = _size(path)
        # The thread's frames are complete once the file has stopped growing.
        if size == before and size > start and (frames := frames_of(_text(path, start), thread)):
            return frames
        before = size
        time.sleep(0.05)
    return []


def frames_of(stacks: str, thread: int) -> list[str]:
    """One thread's frames in faulthandler's output, innermost first; of several dumps, those of the last."""
    frames: list[str] = []
    inside = False
    for line in stacks.splitlines():
        if "hread 0x" in line:
            inside = f"0x{thread:016x}" in line
            frames = [] if inside else frames
        elif inside and line.startswith("  "):
            frames.append(line.strip())
        else:
            inside = False
    return frames


def _shown(frames: Sequence[str]) -> list[str]:
    """The innermost frames, and the outer ones that are not in installed packages."""
    lines: list[str] = []
    for index, frame in enumerate(frames):
        if index < INNERMOST or "-packages/" not in frame:
            lines.append(re.sub(r'".*-packages/', '"', frame))
        elif lines[-1] != "…":
            lines.append("…")
    return lines[:FRAMES] + ["…"] * (len(lines) > FRAMES)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path, start: int) -> str:
    if not path.is_file():  # a pipe has no end
        return ""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
