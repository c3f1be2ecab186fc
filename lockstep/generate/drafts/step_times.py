"""Step times of decoding by number of rows, for the choice of draft lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as ListLike

import numpy as np

from lockstep.generate.runner import Pace

RECORDING_COST = 0.15
"""The cost of recording a size, spread over the steps in which it should pay off, as a fraction of what it saves."""
WARMUP_STEPS = 3
"""First steps of a size, of which only the fastest counts: they may be slow."""
TOO_FAST = 0.7
"""A step below this fraction of the expected time is no accident: the machine has become faster, or the estimate was
too high."""
SETTLED_AFTER = 8
"""Steps of a size after which its estimate is reliable."""
RECENT = 32
"""Steps since the last one of a size, after which its estimate may be outdated."""
LEVEL_RATE, SIZE_RATE = 0.2, 0.03
"""How much a later step moves the level of the machine, and the estimate of its size."""
GROWTH = 2
"""A step has at most this many times the rows of the largest timed step."""
OUTLIER = 4
"""Times above this multiple of the mean are caused by other processes."""

Padded = Callable[[np.ndarray], np.ndarray]
"""The rows that steps of these sizes compute, padding included."""


def unpadded(rows: np.ndarray) -> np.ndarray:
    return rows


class MovingMean:
    """A moving mean of times, robust to outliers. The first time may be slow: it counts only if it is faster than the
    second."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._first: float | None = None

    def update(self, seconds: float) -> float:
        """Adds a time; returns it, clipped if it is an outlier."""
        if self._first is None:
            self._first = seconds
            return 0.0
        if not self.mean:
            self.mean = min(self._first, seconds)
        elif seconds < self.mean / OUTLIER:  # the mean was too high, or is outdated
            self.mean = seconds
        else:
            self.mean += 0.2 * (min(seconds, OUTLIER * self.mean) - self.mean)
        return min(seconds, OUTLIER * self.mean)


class StepTimes:
    """Estimates the seconds of a decode step by its rows, from the steps that have run."""

    def __init__(self, padded: Padded = unpadded) -> None:
        self._padded = padded
        self._steady: dict[int, float] = {}
        """Seconds of steady steps, by the rows that they compute."""
        self._counts: Counter[int] = Counter()
        self._timed: dict[int, int] = {}
        """The number of the last step of each size, and the number of all steps."""
        self._steps = 0
        self._level = 1.0
        """Factor by which the machine is slower than before."""
        self._unrecorded: dict[int, float] = {}
        """The fastest unrecorded step of each size."""
        self._gain: float | None = None
        """Seconds that recording saves per step; None: unknown."""
        self._curve: tuple[list[int], np.ndarray] | None = None
        """Sizes that have run and their seconds; None: outdated."""

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
        """A slower machine or a longer context affects every size, so it is a common factor, the level."""
        estimate, now = self._steady.get(rows, np.inf), seconds / self._level
        self._steps += 1
        # The first steps of a size may be slow, and the estimate of one that has not run for long may be outdated.
        certain = self._steps - self._timed.get(rows, -RECENT) < RECENT and self._counts[rows] >= SETTLED_AFTER
        self._timed[rows] = self._steps
        self._counts[rows] += 1
        if self._counts[rows] <= WARMUP_STEPS or (now < TOO_FAST * estimate and not certain):
            self._steady[rows] = min(estimate, now)
        elif now < TOO_FAST * estimate:  # the machine is faster again
            self._move_level(now / estimate)
        else:
            surprise = min(1.3, now / estimate)  # a disturbed step counts little
            self._move_level(surprise**LEVEL_RATE)
            self._steady[rows] *= surprise**SIZE_RATE

    def _move_level(self, factor: float) -> None:
        self._level *= factor
        if not 0.1 < self._level < 10:  # rescales the times, so that the level stays finite
            for times in (self._steady, self._unrecorded):
                times.update({rows: each * self._level for rows, each in times.items()})
            self._gain = None if self._gain is None else self._gain * self._level
            self._level = 1.0

    def _gained(self) -> float | None:
        """The largest saving of any size: a size that looks too fast is soon tried and timed, one that looks too slow
        is not. First steps are slower still, so a size counts as at most the time of larger ones."""
        least, gains = np.inf, []
        for rows in sorted(self._unrecorded, reverse=True):
            least = min(least, self._unrecorded[rows])
            if rows in self._steady:
                gains.append(least - self._steady[rows])
        return max(0.0, *gains) if gains else None

    def knows(self, rows: int) -> bool:
        """Whether a step of at most so many rows has run."""
        sizes = self._sizes()
        return bool(sizes) and self._size(rows) >= min(sizes)

    def next_size(self, rows: int) -> int | None:
        """The next larger size that has run; None if there is none."""
        current = self._size(rows)
        return min((size for size in self._steady if size > current), default=None)

    def is_new(self, rows: int) -> bool:
        """Whether so few steady steps of this size have run that its time is uncertain."""
        return self._counts[self._size(rows)] < SETTLED_AFTER

    def is_steady(self, rows: int) -> bool:
        """Whether a steady step of this size has run."""
        return self._size(rows) in self._steady

    def may_be_faster(self, rows: int) -> bool:
        """Whether a few more steps of this size may show that it is faster: not while it is unrecorded."""
        return self.is_new(rows) and (self.is_steady(rows) or self._size(rows) not in self._unrecorded)

    def _size(self, rows: int) -> int:
        """The rows that a step computes, padding included."""
        return int(self._padded(np.array([rows]))[0])

    @property
    def most_rows(self) -> int:
        """The most rows of a step that may be tried."""
        return GROWTH * max(self._sizes(), default=0)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Interpolated linearly between sizes that have run, extrapolated with the average slope beyond them; plus a
        share of the cost of recording for sizes that are not recorded."""
        if self._curve is None:
            sizes = sorted(self._sizes())
            self._curve = sizes, self._estimates(sizes)
        sizes, seconds = self._curve
        rows = self._padded(rows)
        inside = np.interp(rows, sizes, seconds)
        if self._gain:
            inside += RECORDING_COST * self._gain * np.array([count not in self._steady for count in rows.tolist()])
        if len(sizes) < 2:
            return self._level * inside
        slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
        return self._level * (inside + slope * np.maximum(rows - sizes[-1], 0))

    def _sizes(self) -> set[int]:
        return {*self._steady, *(() if self._gain is None else self._unrecorded)}

    def _estimates(self, sizes: ListLike[int]) -> np.ndarray:
        """Seconds of these sizes. More rows never take less time: if a step of more rows was faster, the slower one was
        disturbed. The estimate of an unrecorded size is at least the time of steady steps with fewer rows, and at least
        its rows' share of the time of steady steps with more."""
        steady, rows = np.array([self._steady.get(size, np.inf) for size in sizes]), np.array(sizes)
        least, ran = _least_after(steady), steady < np.inf
        fewer = np.maximum.accumulate(np.where(ran, least, 0.0))
        share = -_least_after(np.where(ran, -least / rows, 0.0)) * rows
        gain = self._gain or 0.0
        estimated = [np.inf if size in self._steady else self._unrecorded[size] - gain for size in sizes]
        return np.minimum(least, np.maximum(_least_after(np.array(estimated)), np.maximum(fewer, share)))


def _least_after(values: np.ndarray) -> np.ndarray:
    """The minimum of each value and those after it."""
    return np.minimum.accumulate(values[::-1])[::-1]
