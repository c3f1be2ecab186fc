"""The lengths of drafts over whole generations, with simulated steps: a machine's clock wanders more than drafts may
cost.

Run: python -m tests.generate.test_draft_lengths, for the table in benchmarks/NOTES.md.
"""

import math
import random
import statistics
from collections import Counter
from itertools import takewhile
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.generate.drafts.lengths import DraftLengths
from lockstep.generate.drafts.step_times import StepTimes, unpadded
from lockstep.generate.step_graphs import DRAFT_ROWS, SEEN_BEFORE_RECORDING

NEW = 128
"""Tokens of a sequence."""
# A 5M model in bfloat16 on two cores of an AMD EPYC (Zen 3): milliseconds of a decode step by its rows.
ROWS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 1024]
TIMES = [2.45, 2.45, 2.8, 2.94, 3.12, 3.6, 4.55, 5.41, 7.4, 8.15, 10.45, 14.2, 18.7, 24.75, 41.0, 49.5, 200.0]
PYTHON = 5.0
"""By how much a step takes longer that is not repeated from a tape."""
COLD, COLD_STEPS = 6.0, 3
"""By how much the first steps take longer still."""
RECORDED = 64
"""Most rows of a tape."""


class _Sequence:
    params = SimpleNamespace(max_tokens=NEW)
    sampled = 1


class _Machine:
    padded = staticmethod(unpadded)
    choosing, drafting = 0.006, 0.03
    """To choose the length for one sequence, and to draft for it."""
    hiccup, hiccup_at = 0.0, ""
    """By how much one choice or draft takes longer, and which, such as "choosing 2", the second."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.sights: Counter[int] = Counter()
        self.times: Counter[str] = Counter()
        self.recorded: set[int] = set()
        self.steps, self.level = 0, 1.0

    def late(self, what: str) -> float:
        """What a hiccup adds this time."""
        self.times[what] += 1
        return self.hiccup if f"{what} {self.times[what]}" == self.hiccup_at else 0.0

    @staticmethod
    def fits(rows: int) -> bool:
        return rows <= DRAFT_ROWS or rows % DRAFT_ROWS == 0 or rows > RECORDED

    def step(self, rows: int) -> tuple[float, float, str]:
        """What a step takes, what the clock shows of it on a machine with other work, and its pace."""
        self.steps += 1
        pace = "steady"
        if rows <= RECORDED and self.fits(rows) and rows not in self.recorded:
            self.sights[rows] += 1
            pace = "unrecorded" if self.sights[rows] < (SEEN_BEFORE_RECORDING if self.recorded else 3) else "recording"
        taped = rows in self.recorded or rows > RECORDED
        taken = float(np.interp(rows, ROWS, TIMES)) + (0.0 if taped else PYTHON)
        if pace == "recording":
            self.recorded.add(rows)
            taken += 0.8 * SEEN_BEFORE_RECORDING * PYTHON
        if self.steps <= COLD_STEPS:
            taken += COLD
        self.level = min(1.25, max(0.8, self.level * math.exp(self.random.gauss(0, 0.01))))
        disturbed = 1.7 if self.random.random() < 0.03 else 1.0
        return taken, taken * self.level * disturbed * math.exp(self.random.gauss(0, 0.1)), pace


class _Graphs(_Machine):
    """A GPU whose steps are padded to powers of two: a 0.6B model on an H100."""

    choosing, drafting = 0.01, 0.01

    @staticmethod
    def fits(rows: int) -> bool:
        return True

    @staticmethod
    def padded(rows: np.ndarray) -> np.ndarray:
        return 2 ** np.ceil(np.log2(rows)).astype(int)

    def step(self, rows: int) -> tuple[float, float, str]:
        self.steps += 1
        (computed,) = self.padded(np.array([rows]))
        taken = float(np.interp(computed, [1, 16, 64, 128, 256, 1024], [2.4, 2.7, 3.4, 4.8, 5.4, 12.0]))
        pace = "steady" if computed in self.recorded else "recording"
        self.recorded.add(computed)
        seen = 2 * taken if self.random.random() < 0.03 else taken * math.exp(self.random.gauss(0, 0.03))
        return taken, seen, pace


class _SlowWhenNew(_Graphs):
    """Some sizes are slow for a few steps after they are recorded, as was seen on an H100."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.met: Counter[int] = Counter()
        self.slow = {size for size in (1, 2, 4, 8, 16, 32, 64, 128) if self.random.random() < 0.4}

    def step(self, rows: int) -> tuple[float, float, str]:
        size = int(self.padded(np.array([rows]))[0])
        self.met[size] += 1
        factor = 1.95 if size in self.slow and 2 <= self.met[size] <= 5 else 1
        taken, seen, pace = super().step(rows)
        return factor * taken, factor * seen, pace


class _SlowAtFirst(_Graphs):
    """Its clock runs slow for a while, in which most sizes are met for the first time."""

    def step(self, rows: int) -> tuple[float, float, str]:
        taken, seen, pace = super().step(rows)
        return taken, seen * (4 if 5 <= self.steps < 60 else 1), pace


def _generation(machine: _Machine, batch: int, lengths: DraftLengths | None, right: float) -> float:
    """What it takes to generate NEW tokens of each sequence, with drafts of which so many are right, or without."""
    in_flight, total = [_Sequence() for _ in range(batch)], 0.0
    while in_flight:
        rows, counts = len(in_flight), [0] * len(in_flight)
        if lengths is not None and not lengths.backs_off(rows):
            limits = [NEW - each.sampled - 1 for each in in_flight]
            counts = lengths.choose(in_flight, limits, rows, 1024 - rows, machine.fits)
            choosing = 0.1 + machine.choosing * rows + machine.late("choosing") if lengths.compared else 0.002
            lengths.chose(choosing)
            total += choosing
            asked = [count for count in counts if count]
            drafting = machine.drafting * len(asked)
            total += drafting
            if asked:
                lengths.drafted(asked, sum(asked), drafting + machine.late("drafting"), rows)
            if lengths.trying:
                lengths.wasted()
        taken, seen, pace = machine.step(rows + sum(counts))
        total += taken
        if lengths is not None:
            lengths.times.record(rows + sum(counts), seen, pace)
        for each, count in zip(in_flight, counts):
            accepted = len(list(takewhile(lambda _: machine.random.random() < right, range(count))))
            if count:
                lengths.verified(each, count, accepted)
            each.sampled += 1 + accepted
        in_flight = [each for each in in_flight if each.sampled < NEW]
    return total


def gained(batch: int, right: float, seed: int, kind: type[_Machine] = _Machine, before: int = 3) -> float:
    """By how much five generations are faster, after a few that the engine learns from."""
    machine, lengths = kind(seed), DraftLengths(15, kind.padded)
    for _ in range(before):
        _generation(machine, batch, lengths, right)
    plain, drafted = (sum(_generation(machine, batch, how, right) for _ in range(5)) for how in (None, lengths))
    return plain / drafted


@pytest.mark.parametrize(
    ("batch", "right", "least"),
    [
        (1, 0.0, 0.97), (1, 0.5, 1.2), (1, 1.0, 4.0), (4, 0.25, 0.97), (4, 1.0, 2.0), (8, 0.6, 0.97), (12, 0.6, 0.97),
        (16, 0.0, 0.97), (16, 1.0, 1.5),
    ],
)  # fmt: skip
def test_drafts_gain_where_they_are_right_and_cost_little_where_not(batch, right, least):
    assert statistics.median(gained(batch, right, seed) for seed in range(9)) >= least


@pytest.mark.parametrize(("batch", "right", "least"), [(4, 0.9, 3.0), (16, 0.5, 1.1), (64, 0.0, 0.97), (64, 0.9, 1.75)])
def test_rows_that_padding_computes_in_any_case_are_filled_with_drafts(batch, right, least):
    assert statistics.median(gained(batch, right, seed, _Graphs) for seed in range(5)) >= least


@pytest.mark.parametrize(("batch", "least"), [(1, 5.0), (4, 3.5), (16, 2.2)])
def test_what_was_timed_while_the_machine_was_slow_is_timed_again(batch, least):
    assert statistics.median(gained(batch, 0.9, seed, _SlowAtFirst, before=8) for seed in range(5)) >= least


@pytest.mark.parametrize(("batch", "least"), [(1, 10.0), (4, 8.0), (16, 6.5)])
def test_a_size_whose_first_steps_are_slow_is_used_all_the_same(batch, least):
    assert min(gained(batch, 1.0, seed, _SlowWhenNew, before=1) for seed in range(9)) >= least


@pytest.mark.parametrize("time", ["choosing 1", "choosing 2", "drafting 1", "drafting 2", "drafting 3"])
@pytest.mark.parametrize("kind", [_Machine, _Graphs])
def test_a_hiccup_while_choosing_or_drafting_stops_no_drafts(monkeypatch, kind, time):
    """The first draft may read all of a prompt."""
    monkeypatch.setattr(kind, "hiccup", 100.0)
    monkeypatch.setattr(kind, "hiccup_at", time)
    assert statistics.median(gained(4, 1.0, seed, kind, before=1) for seed in range(5)) >= 2.0


@pytest.mark.parametrize("slowest", [1.3, 4.0])
def test_times_are_right_however_often_the_machine_or_longer_contexts_slow_steps_down(slowest):
    times, draw, rows = StepTimes(), random.Random(0), [1, 2, 4, 8]
    for step in range(40_000):
        each, slower = draw.choice(rows), 1 + (slowest - 1) * (step % 200) / 200
        disturbed = 2 if draw.random() < 0.02 else 1
        times.record(each, (2.4 + 0.1 * each) * slower * disturbed * math.exp(draw.gauss(0, 0.05)))
        if step % 200 == 199 and step > 1000:
            # The level follows a fifth of a step's surprise: behind by some steps of 1.5 %, and by disturbed ones.
            assert times.of(np.array(rows)) == pytest.approx((2.4 + 0.1 * np.array(rows)) * slowest, rel=0.2)
    assert 0.1 < times._level < 10, "it stays a number"


if __name__ == "__main__":
    for batch in (1, 4, 16, 64):
        cells = []
        for right in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
            found = sorted(gained(batch, right, seed) for seed in range(15))
            cells.append(f"{right:.2f}: {found[0]:.2f} {statistics.median(found):.2f} {found[-1]:.2f}")
        print(f"{batch:3} sequences, least, median and most: " + " | ".join(cells), flush=True)
