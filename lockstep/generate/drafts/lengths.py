"""How many tokens to propose for each sequence: as many as raise throughput, given recent acceptance."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from lockstep.generate.drafts.step_times import MovingMean, Padded, StepTimes, unpadded
from lockstep.generate.sequence import Sequence

DECAY = 0.97
"""Decay of the acceptance statistics per checked token."""
INITIAL_RATE = 0.7
"""Acceptance rate before any token was checked."""
PRIOR_WEIGHT = 8
"""Weight, in checked tokens, of the rate over all sequences in the estimate of one sequence's rate."""
MARGIN = 1.08
"""Draft only if the expected throughput is more than this multiple of that without drafts: less is noise."""
BACKOFF = 64
"""Most steps without drafts before a few sequences try again; up to MAX_BACKOFF if all drafts were rejected."""
MAX_BACKOFF = 256
BACKOFF_WITHOUT_DRAFT = 8
"""The same if the draft proposed nothing."""
FIRST_RETRY, MAX_RETRY = 16, 256
"""Profitable choices after which the next larger step size is tried: at first; doubled each time, up to the second."""
RETRY_NEW = 2
"""The same if that size is new."""
MAX_OVERHEAD = 0.02
"""Most time spent on finding that drafts do not pay, as a fraction of the time of steps without drafts."""
RETRY_FRACTION = 0.75
"""Backing off ends below this fraction of the number of sequences at which drafts did not pay: rows cost less then."""
LEAST_GAIN = 0.02
"""Draft tokens whose expected gain is below this, in tokens, are not considered."""
HOLD_STEPS = 3
"""Further steps that use the chosen lengths."""

Fits = Callable[[int], bool]
"""Whether a step with drafts may have so many rows."""


def any_rows(rows: int) -> bool:
    return True


@dataclass
class Acceptance:
    """Recent acceptance: accepted and checked tokens; a draft is checked up to its first rejected token."""

    accepted: float = 0.0
    checked: float = 0.0

    def update(self, proposed: int, accepted: int) -> None:
        checked = min(proposed, accepted + 1)
        decay = DECAY**checked
        self.accepted = self.accepted * decay + accepted
        self.checked = self.checked * decay + checked

    def rate(self, prior: float, weight: float) -> float:
        """The estimated acceptance rate, with `prior` counting as `weight` checked tokens."""
        return (self.accepted + weight * prior) / (self.checked + weight)


class DraftLengths:
    """Chooses draft lengths, given acceptance rates and step times so far.

    The j-th token of a draft is accepted with the probability acceptance rate ** j. Of all tokens that could be
    proposed in a step, the likeliest are chosen, as many as maximize the expected tokens per second.
    """

    def __init__(self, most: int, padded: Padded = unpadded):
        self.most = most
        self.trying = False
        """Whether the last choice was an experiment, not expected to pay."""
        self.compared = False
        """Whether the last choice compared lengths: not if it kept the last lengths, or if there was no room."""
        self._paying, self._tried_after = 0, FIRST_RETRY
        """Profitable choices since the next larger size was tried, and the number after which it is tried again."""
        self.times = StepTimes(padded)
        self._all = Acceptance()
        self._per_sequence: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()
        self._backoff = self._steps_waited = self._unprofitable_sequences = 0
        self._backoff_limit = BACKOFF
        self._recovery_steps = 0
        """Steps without drafts until the wasted time is less than MAX_OVERHEAD of theirs."""
        self._plain = 0.0
        """Seconds of a step without drafts."""
        self._choosing = MovingMean()
        """Seconds of choosing lengths."""
        self._drafting = MovingMean()
        """Seconds of drafting one token for every sequence."""
        self._spent = 0.0
        """Typical seconds of the last choice and its drafting."""
        self._chosen: list[int] = []
        self._chosen_for: tuple[int, list[int]] = 0, []
        """Rows and sequences of the last choice."""
        self._hold = 0
        """Further steps that use these lengths."""
        self._some_accepted = self._holds_if_rejected = False
        """Whether a draft token was accepted since the last choice, and whether lengths are kept if none was."""

    def backs_off(self, sequences: int) -> bool:
        """Whether to skip drafting in this step, because it did not pay recently with about as many sequences."""
        self._steps_waited += 1
        as_expensive = sequences > self._unprofitable_sequences * RETRY_FRACTION
        skips = self._steps_waited <= self._recovery_steps or (self._steps_waited <= self._backoff and as_expensive)
        if skips:
            self._hold = 0
        return skips

    def wasted(self) -> None:
        """Records that choosing, and maybe drafting, did not pay in this step."""
        self._recovery_steps = min(MAX_BACKOFF, int(self._spent / (MAX_OVERHEAD * self._plain))) if self._plain else 0

    def chose(self, seconds: float) -> None:
        """Records the seconds of `choose`."""
        self._spent = self._choosing.update(seconds) if self.compared else 0.0

    def choose(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits = any_rows
    ) -> list[int]:
        """Tokens to draft per sequence, at most `limits[i]` and `room` in all; `rows`: the step's rows without drafts.

        Profitable lengths are used for a few steps, since choosing is slow.
        """
        chosen_for, accepted, self._some_accepted = (rows, list(map(id, sequences))), self._some_accepted, False
        self.compared = False
        lengths = list(map(min, self._chosen, limits))
        same = chosen_for == self._chosen_for and sum(lengths) <= room
        if self._hold and (accepted or self._holds_if_rejected) and same:
            self._hold -= 1
            return lengths
        self._hold, self._holds_if_rejected, self._chosen_for = 0, False, chosen_for
        self._chosen = self._choose(sequences, limits, rows, room, fits)
        return self._chosen

    def _choose(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits
    ) -> list[int]:
        none, self.trying = [0] * len(sequences), True
        room = min(room, self.times.most_rows - rows, sum(limits))
        if room <= 0:
            return none
        self.compared = True
        counts = self._best(sequences, limits, rows, room, fits)
        if any(counts):
            self.trying, self._recovery_steps = False, 0
            return counts
        self._back_off(len(sequences), self._backoff_limit)
        if self._backoff < self._backoff_limit:
            return none
        counts = self._trial(sequences, limits, rows, room, fits)
        if self.times.may_be_faster(rows + sum(counts)):
            self._hold = HOLD_STEPS
        return counts

    def drafted(self, requested: ListLike[int], proposed: int, seconds: float, sequences: int) -> None:
        """Records a step's drafting: tokens requested per sequence and proposed in all, and seconds.

        sequences: their number, including those for which nothing was requested.
        """
        share = sum(requested) / sequences
        self._spent += share * self._drafting.update(seconds / share)
        if proposed:
            self._backoff = self._steps_waited = self._unprofitable_sequences = 0
            self._backoff_limit = min(2 * self._backoff_limit, MAX_BACKOFF)  # until a token is accepted
        else:
            self._backoff = min(self._backoff, BACKOFF_WITHOUT_DRAFT)
            self._back_off(sequences, BACKOFF_WITHOUT_DRAFT)

    def _back_off(self, sequences: int, longest: int) -> None:
        self._unprofitable_sequences = sequences
        self._backoff, self._steps_waited = min(max(1, 2 * self._backoff), max(longest, self._backoff)), 0

    def verified(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        self._per_sequence.setdefault(sequence, Acceptance()).update(proposed, accepted)
        self._all.update(proposed, accepted)
        if accepted:
            self._backoff_limit, self._some_accepted = BACKOFF, True
            if self._hold:  # a successful experiment was not wasted
                self._recovery_steps = 0

    def _best(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits
    ) -> list[int]:
        # Mostly plain Python: with few sequences, when drafts pay most, NumPy calls would take a tenth of a step.
        prior, nothing = self._all.rate(INITIAL_RATE, PRIOR_WEIGHT), Acceptance()
        weights = _weights(sequences)
        gains: list[tuple[float, int]] = []
        for place, (sequence, limit) in enumerate(zip(sequences, limits)):
            gain, rate = weights[place], self._per_sequence.get(sequence, nothing).rate(prior, PRIOR_WEIGHT)
            for _ in range(min(limit, self.most)):
                gain *= rate
                if gain < LEAST_GAIN:
                    break
                gains.append((gain, place))
        gains.sort(key=operator.itemgetter(0), reverse=True)
        del gains[room:]
        more = np.arange(len(gains) + 1)
        expected = np.cumsum([sum(weights), *(gain for gain, _ in gains)])
        seconds = self.times.of(rows + more) + self._drafting.mean * more / len(sequences)
        self._plain = float(seconds[0])
        seconds[1:] += self._choosing.mean / (1 + HOLD_STEPS)
        rates = expected / seconds
        rates[0] *= MARGIN
        while (count := int(np.argmax(rates))) and not fits(rows + count):
            rates[count] = 0.0
        if count:
            self._hold, self._holds_if_rejected = HOLD_STEPS, self.times.is_steady(rows + count)
        self._paying += count > 0
        if count and (larger := self._larger(rows, count, len(gains), fits)):
            count, self._hold, self._paying = larger, 0, 0
        counts = [0] * len(sequences)
        for _, place in gains[:count]:
            counts[place] += 1
        return counts

    def _larger(self, rows: int, count: int, most: int, fits: Fits) -> int:
        """The number of draft tokens that fills the next step size, if that is to be tried again; else 0.

        Its time may be too long: the first steps of a size are slow, and the machine may have been slower.
        """
        size = self.times.next_size(rows + count)
        if size is None or size - rows > most or not fits(size):
            return 0
        if self._paying >= RETRY_NEW and self.times.is_new(size):
            return size - rows
        if self._paying < self._tried_after:
            return 0
        self._tried_after = min(MAX_RETRY, 2 * self._tried_after)
        return size - rows

    def _trial(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits
    ) -> list[int]:
        """An experiment: two tokens for one sequence in 16, or as many as fit; first those with the most tokens left.

        The text of a sequence may have become repetitive.
        """
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
    """The weight of each sequence's tokens: higher if more are left, since the longest sequence ends the batch."""
    left = [s.params.max_tokens - s.sampled for s in sequences]
    mean = sum(left) / len(left)
    return [min(2.0, max(0.5, each / mean)) for each in left]
