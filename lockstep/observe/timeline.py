"""The phases of this rank: the current one, seconds per phase of a step, and a trace of the last steps."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import record_function


@dataclass(frozen=True)
class Span:
    """A phase of one step; times in microseconds since the Unix epoch."""

    name: str
    step: int
    began: float
    microseconds: float


class Timeline:
    """Phases of the training loop by name, for the last `steps` steps; 0: only the current phase.

    Times are the host's. On CUDA, a phase ends when its kernels are launched, unless it waits for a result (a loss read
    back, a gradient norm): for kernel times, use the torch profiler, which also shows these phases.
    """

    def __init__(self, rank: int = 0, steps: int = 0):
        self.rank = rank
        self.step = 0
        self.phase = "start"
        self.waits_for = ""
        """What the phase waits for, such as `the other ranks` or `rollouts of generator_0`; empty: nothing."""
        self.patience = 0.0
        """Seconds that the phase may take without progress because of its own limits, such as a reward's."""
        self.message = ""
        """The last message sent, received or logged."""
        self.progress = 0
        """Counts beginnings and ends of phases, in the same way on all ranks: the rank with the lowest is last."""
        self.counters: list[Callable[[], int]] = []
        """Counters of work within phases, such as an engine's steps; read by another thread."""
        self.awaited: Callable[[], str] = str
        """What work within a phase currently waits for, such as `reward worker 0`; read by another thread."""
        self.changed: Callable[[], None] = _nothing
        """Called when a step or a phase begins."""
        self._moves = 0
        self._steps: deque[list[Span]] = deque(maxlen=steps)
        self._current: list[Span] = []
        self._began = time.perf_counter()
        # Wall-clock time, so that ranks share an axis, measured with perf_counter, which never jumps.
        self._offset = time.time() - time.perf_counter()

    def begin(self, step: int) -> None:
        """What follows belongs to `step`."""
        self.step = step
        self.progress += 1
        self._current = []
        self._began = time.perf_counter()
        self._steps.append(self._current)
        self.changed()

    def enter(self, phase: str, waits_for: str = "", patience: float = 0.0) -> None:
        """What follows is `phase`, until another begins. `add` records it when it is over."""
        self.phase, self.waits_for, self.patience = phase, waits_for, patience
        self.progress += 1
        self.changed()

    @contextmanager
    def span(self, name: str, waits_for: str = "", patience: float = 0.0) -> Iterator[None]:
        """A phase: `data`, `forward`, `backward`, `optimizer`, `checkpoint`, `validation` …"""
        outer = self.phase, self.waits_for, self.patience
        self.enter(name, waits_for, patience)
        began = time.perf_counter()
        try:
            with record_function(name):
                yield
            # Not restored after an exception, so that the failure is reported with its phase.
            self.phase, self.waits_for, self.patience = outer
        finally:
            self.progress += 1
            self.add(name, began, time.perf_counter())

    def moved(self) -> None:
        """Reports progress within a phase, so that the watchdog does not consider it stopped."""
        self._moves += 1

    @property
    def work(self) -> int:
        """Counts progress within phases."""
        return self._moves + sum(counter() for counter in self.counters)

    def add(self, name: str, began: float, ended: float) -> None:
        """Records a finished phase of the current step; times of time.perf_counter."""
        self._current.append(Span(name, self.step, (self._offset + began) * 1e6, (ended - began) * 1e6))

    def elapsed(self) -> float:
        """Seconds since the current step began."""
        return time.perf_counter() - self._began

    def seconds(self, name: str) -> float:
        """Seconds of the current step in all its phases with this name."""
        return sum(s.microseconds for s in self._current if s.name == name) / 1e6

    def write(self, path: Path) -> None:
        """Writes the last steps as Chrome trace events, for chrome://tracing and ui.perfetto.dev."""
        names = {"ph": "M", "pid": self.rank, "name": "process_name", "args": {"name": f"rank {self.rank}"}}
        spans = [
            {
                "ph": "X",
                "pid": self.rank,
                "tid": 0,
                "name": span.name,
                "cat": "phase",
                "ts": span.began,
                "dur": span.microseconds,
                "args": {"step": span.step},
            }
            for step in self._steps
            for span in step
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": [names, *spans], "displayTimeUnit": "ms"}))


def _nothing() -> None:
    """The default of `changed`."""


def timeline_path(run: Path, rank: int = 0, ranks: int = 1) -> Path:
    """The path of a rank's trace; `merge_timelines` merges those of all ranks."""
    return run / "timeline.json" if ranks == 1 else run / "timeline" / f"rank_{rank}.json"


def merge_timelines(run: Path, others: Sequence[dict[str, Any]] = ()) -> None:
    """Merges every rank's trace, once all are written, and the events `others` into `timeline.json`."""
    paths = sorted((run / "timeline").glob("rank_*.json"))
    alone = timeline_path(run)
    sources = paths or ([alone] if others and alone.is_file() else [])
    if sources:
        events = [event for path in sources for event in json.loads(path.read_text())["traceEvents"]]
        alone.write_text(json.dumps({"traceEvents": [*events, *others], "displayTimeUnit": "ms"}))
    for path in paths:
        path.unlink()
    if paths:
        paths[0].parent.rmdir()
