"""How long decode steps take by their rows: what the choice of draft lengths weighs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as ListLike

import numpy as np

from lockstep.generate.runner import Pace

RECORDING_COST = 0.15
"""Of what recording gains a step: what an unrecorded size costs more, over the steps in which it should pay off."""
WARMUP_STEPS = 3
"""Steps of a size of which the fastest counts: the first ones may be slow."""
TOO_FAST = 0.7
"""Of what a step should take: it cannot be by accident, so the machine has changed, or what was known had."""
SETTLED_AFTER = 8
"""Steps of a size after which it is no longer new."""
RECENT = 32
"""Steps since the last one of its size, after which what is known of it may be wrong."""
LEVEL_RATE, SIZE_RATE = 0.2, 0.03
"""How far the time of a later one moves the machine's level, and what is known of its size."""
GROWTH = 2
"""A step has at most this many times the rows of the largest step that was timed."""
OUTLIER = 4
"""Times the usual: longer is the machine's, not what was measured."""

Padded = Callable[[np.ndarray], np.ndarray]
"""How many rows steps of so many compute."""


def unpadded(rows: np.ndarray) -> np.ndarray:
    return rows


class MovingMean:
    """A moving mean of what something takes, of which hiccups of the machine are no part. The first time may be slow:
    it counts if the second is slower still."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._first: float | None = None

    def follow(self, seconds: float) -> float:
        """The part of `seconds` that counts."""
        if self._first is None:
            self._first = seconds
            return 0.0
        if not self.mean:
            self.mean = min(self._first, seconds)
        elif seconds < self.mean / OUTLIER:  # so long was not usual, or is no longer
            self.mean = seconds
        else:
            self.mean += 0.2 * (min(seconds, OUTLIER * self.mean) - self.mean)
        return min(seconds, OUTLIER * self.mean)


class StepTimes:
    """Seconds of a decode step by its rows, from the steps that have run: another row is not free at every size."""

    def __init__(self, padded: Padded = unpadded) -> None:
        self._padded = padded
        self._steady: dict[int, float] = {}
        """Of steps that are as fast as they will be, by the rows that they compute."""
        self._counts: Counter[int] = Counter()
        self._timed: dict[int, int] = {}
        """The last step of each size, and of all, counted."""
        self._steps = 0
        self._level = 1.0
        """By how much the machine is slower than it was."""
        self._unrecorded: dict[int, float] = {}
        """The least of steps before they were as fast as they are, or will be."""
        self._gain: float | None = None
        """By how much later ones are faster; None: not known."""
        self._curve: tuple[list[int], np.ndarray] | None = None
        """Sizes that have run and their seconds, since the last record."""

    def record(self, rows: int, seconds: float, pace: Pace = "steady") -> None:
        if pace == "recording":
            return
        rows = self._size(rows)
        self._curve = None
        if pace == "steady":
            self._record_steady(rows, seconds)
        else:
            self._unrecorded[rows] = min(self._unrecorded.get(rows, np.inf), seconds / self._level)
        if rows in self._unrecorded and self._counts[rows] <= WARMUP_STEPS:
            self._gain = self._gained()

    def _record_steady(self, rows: int, seconds: float) -> None:
        """A machine that is slower for a while, or a longer context, is slower at every size."""
        known, now = self._steady.get(rows, np.inf), seconds / self._level
        self._steps += 1
        # The first steps of a size may be slow, and what is known of one that has not run for long may be wrong.
        certain = self._steps - self._timed.get(rows, -RECENT) < RECENT and self._counts[rows] >= SETTLED_AFTER
        self._timed[rows] = self._steps
        self._counts[rows] += 1
        if self._counts[rows] <= WARMUP_STEPS or (now < TOO_FAST * known and not certain):
            self._steady[rows] = min(known, now)
        elif now < TOO_FAST * known:  # the machine is as fast as before
            self._move_level(now / known)
        else:
            surprise = min(1.3, now / known)  # a step that was disturbed says little
            self._move_level(surprise**LEVEL_RATE)
            self._steady[rows] *= surprise**SIZE_RATE

    def _move_level(self, factor: float) -> None:
        self._level *= factor
        if not 0.1 < self._level < 10:  # the times take it over, so that it stays a number
            for times in (self._steady, self._unrecorded):
                times.update({rows: each * self._level for rows, each in times.items()})
            self._gain = None if self._gain is None else self._gain * self._level
            self._level = 1.0

    def _gained(self) -> float | None:
        """The most: a size that looks too fast is soon tried and timed, but one that looks too slow is not. The first
        steps of all are slower still, which those of more rows show."""
        least, gains = np.inf, []
        for rows in sorted(self._unrecorded, reverse=True):
            least = min(least, self._unrecorded[rows])
            if rows in self._steady:
                gains.append(least - self._steady[rows])
        return max(0.0, *gains) if gains else None

    def knows(self, rows: int) -> bool:
        """Whether a step of so few rows has run."""
        sizes = self._sizes()
        return bool(sizes) and self._size(rows) >= min(sizes)

    def next_size(self, rows: int) -> int | None:
        """The next size that has run, beyond that of a step of so many rows; None if there is none."""
        own = self._size(rows)
        return min((size for size in self._steady if size > own), default=None)

    def is_new(self, rows: int) -> bool:
        """Whether so few lasting steps of this size have run that its time is uncertain."""
        return self._counts[self._size(rows)] < SETTLED_AFTER

    def is_steady(self, rows: int) -> bool:
        """Whether a step of this size has been as fast as later ones."""
        return self._size(rows) in self._steady

    def may_be_faster(self, rows: int) -> bool:
        """Whether a few more steps of this size may show that it is faster: not while they are not recorded."""
        return self.is_new(rows) and (self.is_steady(rows) or self._size(rows) not in self._unrecorded)

    def _size(self, rows: int) -> int:
        """The rows that a step of so many computes."""
        return int(self._padded(np.array([rows]))[0])

    @property
    def most_rows(self) -> int:
        """The most rows of a step that may be tried."""
        return GROWTH * max(self._sizes(), default=0)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Interpolated linearly between sizes that have run, and extrapolated with the average slope beyond them; with
        a share of what it takes to record those that are still slower."""
        if self._curve is None:
            sizes = sorted(self._sizes())
            self._curve = sizes, self._known(sizes)
        sizes, known = self._curve
        rows = self._padded(rows)
        inside = np.interp(rows, sizes, known)
        if self._gain:
            inside += RECORDING_COST * self._gain * np.array([count not in self._steady for count in rows.tolist()])
        if len(sizes) < 2:
            return self._level * inside
        slope = (known[-1] - known[0]) / (sizes[-1] - sizes[0])
        return self._level * (inside + slope * np.maximum(rows - sizes[-1], 0))

    def _sizes(self) -> set[int]:
        return {*self._steady, *(() if self._gain is None else self._unrecorded)}

    def _known(self, sizes: ListLike[int]) -> np.ndarray:
        """Seconds of these sizes. More rows never take less time: if a step of more rows was faster, the slower one was
        disturbed. What is only estimated of slower steps takes no less than what has run with fewer rows, nor than its
        rows' share of what has run with more."""
        lasting, rows = np.array([self._steady.get(size, np.inf) for size in sizes]), np.array(sizes)
        least, ran = _least_after(lasting), lasting < np.inf
        fewer = np.maximum.accumulate(np.where(ran, least, 0.0))
        share = -_least_after(np.where(ran, -least / rows, 0.0)) * rows
        gain = self._gain or 0.0
        estimated = [np.inf if size in self._steady else self._unrecorded[size] - gain for size in sizes]
        return np.minimum(least, np.maximum(_least_after(np.array(estimated)), np.maximum(fewer, share)))


def _least_after(values: np.ndarray) -> np.ndarray:
    """The least of each value and those after it."""
    return np.minimum.accumulate(values[::-1])[::-1]
