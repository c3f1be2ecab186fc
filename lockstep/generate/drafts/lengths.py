"""How many tokens to propose for each sequence: as many as raise throughput, given recent acceptance."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from lockstep.generate.runner import Pace
from lockstep.generate.sequence import Sequence

MEMORY = 0.97
"""Decay of the acceptance statistics per checked token."""
FIRST_CHANCE = 0.7
PRIOR = 8
"""Checked tokens that the statistics over all sequences count as, next to a sequence's own."""
MARGIN = 1.1
"""Guess only if the expected throughput is this multiple of that without guesses: less is noise."""
LONGEST_REST = 64
"""Steps without a guess, after which a few sequences try again."""
REST_WITHOUT_A_GUESS = 8
"""The same if the draft had no guess."""
WAKING = 0.75
"""Fraction of the number of sequences at which guesses did not pay: with fewer, rows cost less."""
SHORTEST = 1e-6
"""Seconds that a step takes at least."""
INVESTED = 0.15
"""Of what recording gains a step: what an unrecorded size costs more, over the steps in which it should pay off."""
GROWTH = 2
"""A step has at most this many times the rows of the largest step that was timed."""

Fits = Callable[[int], bool]
"""Whether a step with guesses may have so many rows."""


def any_rows(rows: int) -> bool:
    return True


@dataclass
class Acceptance:
    """How many of the tokens checked lately were drawn; a guess is checked up to its first wrong token."""

    accepted: float = 0.0
    checked: float = 0.0

    def update(self, proposed: int, accepted: int) -> None:
        checked = min(proposed, accepted + 1)
        kept = MEMORY**checked
        self.accepted = self.accepted * kept + accepted
        self.checked = self.checked * kept + checked

    def chance(self, prior: float, weight: float) -> float:
        """The probability that the next token is drawn, with `prior` counting as `weight` checked tokens."""
        return (self.accepted + weight * prior) / (self.checked + weight)


class StepTimes:
    """Seconds of a decode step by its rows, from the steps that have run: another row is not free at every size."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._slower: dict[int, float] = {}
        """The least seconds of steps before they were as fast as they are, or will be."""
        self._lasting: set[int] = set()
        """Rows of steps that are as fast as they will be."""
        self._gain: float | None = None
        """By how much later ones are faster; None: not known."""

    def record(self, rows: int, seconds: float, pace: Pace = "lasting") -> None:
        if pace == "recording":
            return
        if pace == "slower":
            self._slower[rows] = min(seconds, self._slower.get(rows, seconds))
            if self._gain is None:
                return
            seconds = max(SHORTEST, self._slower[rows] - self._gain)
        place = bisect.bisect_left(self._rows, rows)
        if place == len(self._rows) or self._rows[place] != rows:
            self._rows.insert(place, rows)
            self._seconds.insert(place, seconds)
        elif seconds < self._seconds[place] or pace == "slower":
            self._seconds[place] = seconds
        else:  # what persists is not noise: a longer context, or other work on the machine
            self._seconds[place] += 0.1 * (seconds - self._seconds[place])
        if pace == "lasting":
            self._lasting.add(rows)
        if pace == "lasting" and rows in self._slower:
            # The most: a size that looks too fast is soon tried and timed, but one that looks too slow is not.
            self._gain = max(self._gain or 0.0, self._slower[rows] - self._seconds[place])

    @property
    def fewest_rows(self) -> int:
        """The fewest rows of a step that has run; 0 before the first."""
        return self._rows[0] if self._rows else 0

    @property
    def most_rows(self) -> int:
        """The most rows of a step that may be tried."""
        return GROWTH * self._rows[-1] if self._rows else 0

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Interpolated linearly between sizes that have run, and extrapolated with the average slope beyond them; with
        a share of what it takes to record those that are still slower."""
        # More rows never take less time: if a step of more rows was faster, the slower one was disturbed.
        known = np.minimum.accumulate(self._seconds[::-1])[::-1]
        inside = np.interp(rows, self._rows, known)
        if self._gain:
            inside += INVESTED * self._gain * np.array([count not in self._lasting for count in rows.tolist()])
        if len(self._rows) < 2:
            return inside
        slope = (known[-1] - known[0]) / (self._rows[-1] - self._rows[0])
        return inside + slope * np.maximum(rows - self._rows[-1], 0)


class DraftLengths:
    """Chooses lengths, and learns from the results.

    The probability that a sequence's guess holds for j tokens is its acceptance rate to the power of j. Of all tokens
    that could be proposed in a step, the likeliest are taken, as many as maximize the expected tokens per second.
    """

    def __init__(self, most: int):
        self.most = most
        self.times = StepTimes()
        self._all = Acceptance()
        self._own: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()
        self._rest = self._rested = self._paid_not_for = 0
        self._guessing = 0.0
        """Seconds that choosing and guessing take for one token of every sequence."""

    def rests(self, sequences: int) -> bool:
        """Whether to skip guessing in this step, since it did not pay recently with about as many sequences."""
        self._rested += 1
        return self._rested <= self._rest and sequences > self._paid_not_for * WAKING

    def choose(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits = any_rows
    ) -> list[int]:
        """Tokens to guess per sequence, at most `limits[i]` and `room` in all; `rows`: the step's rows without them."""
        none = [0] * len(sequences)
        room = min(room, self.times.most_rows - rows, sum(limits))
        if room <= 0:
            return none
        counts = self._best(sequences, limits, rows, room, fits)
        if any(counts):
            return counts
        self._begin_rest(len(sequences), LONGEST_REST)
        return self._trial(sequences, limits, rows, room, fits) if self._rest == LONGEST_REST else none

    def guessed(self, asked: ListLike[int], proposed: int, seconds: float, sequences: int) -> None:
        """`asked` tokens were requested and `proposed` came; choosing and guessing for all sequences took `seconds`."""
        each = seconds * sequences / sum(asked)
        self._guessing += (each - self._guessing) * (0.2 if self._guessing else 1.0)
        if proposed:
            self._rest = self._rested = self._paid_not_for = 0
        else:
            self._begin_rest(sequences, REST_WITHOUT_A_GUESS)

    def _begin_rest(self, sequences: int, longest: int) -> None:
        self._paid_not_for = sequences
        self._rest, self._rested = min(max(1, 2 * self._rest), max(longest, self._rest)), 0

    def verified(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        self._own.setdefault(sequence, Acceptance()).update(proposed, accepted)
        self._all.update(proposed, accepted)

    def _best(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits
    ) -> list[int]:
        # Mostly plain Python: with few sequences, when guesses pay most, NumPy's calls would take a tenth of a step.
        prior, nothing = self._all.chance(FIRST_CHANCE, PRIOR), Acceptance()
        weights = _weights(sequences)
        gains: list[tuple[float, int]] = []
        for place, (sequence, limit) in enumerate(zip(sequences, limits)):
            gain, chance = weights[place], self._own.get(sequence, nothing).chance(prior, PRIOR)
            for _ in range(min(limit, self.most)):
                gain *= chance
                gains.append((gain, place))
        gains.sort(key=operator.itemgetter(0), reverse=True)
        del gains[room:]
        more = np.arange(len(gains) + 1)
        expected = np.cumsum([sum(weights), *(gain for gain, _ in gains)])
        rates = expected / (self.times.of(rows + more) + self._guessing * more / len(sequences))
        rates[1:] *= [fits(rows + count) for count in range(1, len(more))]
        taken = int(np.argmax(rates))
        counts = [0] * len(sequences)
        if rates[taken] >= MARGIN * rates[0]:
            for _, place in gains[:taken]:
                counts[place] += 1
        return counts

    def _trial(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits
    ) -> list[int]:
        """Two tokens for one sequence in 16, or as many as fit, those with the most tokens left: texts begin to repeat
        themselves."""
        order = sorted(range(len(sequences)), key=lambda place: -limits[place])
        counts = [0] * len(sequences)
        for tried, place in enumerate(order):
            if tried > len(sequences) // 16 and fits(rows):
                break
            counts[place] = min(2, limits[place], room)
            room -= counts[place]
            rows += counts[place]
        return counts


def _weights(sequences: ListLike[Sequence]) -> list[float]:
    """The value of a token of each: higher if more are to come, since the longest sequence determines the end."""
    left = [s.params.max_tokens - s.sampled for s in sequences]
    mean = sum(left) / len(left)
    return [min(2.0, max(0.5, each / mean)) for each in left]
