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
PRIOR_WEIGHT = 8
"""Checked tokens that the statistics over all sequences count as, next to a sequence's own."""
MARGIN = 1.08
"""Draft only if the expected throughput is this multiple of that without drafts: less is noise."""
BACKOFF = 64
"""Steps without a draft, after which a few sequences try again; after drafts that were all wrong, up to MAX_BACKOFF."""
MAX_BACKOFF = 256
BACKOFF_WITHOUT_DRAFT = 8
"""The same if the draft had no draft."""
FIRST_RETRY, MAX_RETRY = 16, 256
"""Choices that pay, after which one is of the next larger size: at first, then twice as many each time, and at last."""
RETRY_NEW = 2
"""The same if that size is new."""
MAX_OVERHEAD = 0.02
"""Fraction of the time of steps without drafts that it may take to find that they do not pay."""
RETRY_FRACTION = 0.75
"""Fraction of the number of sequences at which drafts did not pay: with fewer, rows cost less."""
LEAST_GAIN = 0.02
"""Expected tokens below which a draft is not considered, whatever a row costs."""
HOLD_STEPS = 3
"""Steps for which chosen lengths stay."""

Fits = Callable[[int], bool]
"""Whether a step with drafts may have so many rows."""


def any_rows(rows: int) -> bool:
    return True


@dataclass
class Acceptance:
    """How many of the tokens checked lately were drawn; a draft is checked up to its first wrong token."""

    accepted: float = 0.0
    checked: float = 0.0

    def update(self, proposed: int, accepted: int) -> None:
        checked = min(proposed, accepted + 1)
        kept = DECAY**checked
        self.accepted = self.accepted * kept + accepted
        self.checked = self.checked * kept + checked

    def rate(self, prior: float, weight: float) -> float:
        """The probability that the next token is drawn, with `prior` counting as `weight` checked tokens."""
        return (self.accepted + weight * prior) / (self.checked + weight)


class DraftLengths:
    """Chooses lengths, and learns from the results.

    The probability that a sequence's draft holds for j tokens is its acceptance rate to the power of j. Of all tokens
    that could be proposed in a step, the likeliest are taken, as many as maximize the expected tokens per second.
    """

    def __init__(self, most: int, padded: Padded = unpadded):
        self.most = most
        self.trying = False
        """Whether what was chosen last is only to learn, not because it pays."""
        self.compared = False
        """Whether the last choice compared lengths: not if some stayed, or if there was no room."""
        self._paying, self._tried_after = 0, FIRST_RETRY
        """Choices that pay since one was of the next larger size, and the number after which another is."""
        self.times = StepTimes(padded)
        self._all = Acceptance()
        self._per_sequence: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()
        self._backoff = self._steps_waited = self._unprofitable_sequences = 0
        self._backoff_limit = BACKOFF
        self._recovery_steps = 0
        """Steps without a draft after which what was spent in vain is a small part of them."""
        self._plain = 0.0
        """Seconds of a step without drafts."""
        self._choosing = MovingMean()
        """Seconds that it takes to choose lengths."""
        self._drafting = MovingMean()
        """Seconds that it takes to draft one token of every sequence."""
        self._spent = 0.0
        """Seconds that it usually takes to choose and to draft as was done last."""
        self._chosen: list[int] = []
        self._chosen_for: tuple[int, list[int]] = 0, []
        """Rows and sequences that lengths were last chosen for."""
        self._hold = 0
        """Further steps for which these lengths stay."""
        self._some_accepted = self._holds_if_rejected = False
        """Whether some draft was right since the last choice, and whether lengths stay if none was."""

    def backs_off(self, sequences: int) -> bool:
        """Whether to skip drafting in this step, since it did not pay recently with about as many sequences."""
        self._steps_waited += 1
        dear = sequences > self._unprofitable_sequences * RETRY_FRACTION
        resting = self._steps_waited <= self._recovery_steps or (self._steps_waited <= self._backoff and dear)
        if resting:
            self._hold = 0
        return resting

    def wasted(self) -> None:
        """Drafts were found not to pay in this step, and maybe some were tried."""
        self._recovery_steps = min(MAX_BACKOFF, int(self._spent / (MAX_OVERHEAD * self._plain))) if self._plain else 0

    def chose(self, seconds: float) -> None:
        """It took so long to choose."""
        self._spent = self._choosing.follow(seconds) if self.compared else 0.0

    def choose(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits = any_rows
    ) -> list[int]:
        """Tokens to draft per sequence, at most `limits[i]` and `room` in all; `rows`: the step's rows without them.

        What is chosen stays for a few steps if it pays, since to choose takes long.
        """
        chosen_for, held, self._some_accepted = (rows, list(map(id, sequences))), self._some_accepted, False
        self.compared = False
        kept = list(map(min, self._chosen, limits))
        if self._hold and (held or self._holds_if_rejected) and chosen_for == self._chosen_for and sum(kept) <= room:
            self._hold -= 1
            return kept
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

    def drafted(self, asked: ListLike[int], proposed: int, seconds: float, sequences: int) -> None:
        """`asked` tokens were requested and `proposed` came; to draft for all sequences took so many seconds."""
        share = sum(asked) / sequences
        self._spent += share * self._drafting.follow(seconds / share)
        if proposed:
            self._backoff = self._steps_waited = self._unprofitable_sequences = 0
            self._backoff_limit = min(2 * self._backoff_limit, MAX_BACKOFF)  # until one is right
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
            if self._hold:  # a try that goes on was not in vain
                self._recovery_steps = 0

    def _best(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits
    ) -> list[int]:
        # Mostly plain Python: with few sequences, when drafts pay most, NumPy's calls would take a tenth of a step.
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
        while (taken := int(np.argmax(rates))) and not fits(rows + taken):
            rates[taken] = 0.0
        if taken:
            self._hold, self._holds_if_rejected = HOLD_STEPS, self.times.is_steady(rows + taken)
        self._paying += taken > 0
        if taken and (larger := self._larger(rows, taken, len(gains), fits)):
            taken, self._hold, self._paying = larger, 0, 0
        counts = [0] * len(sequences)
        for _, place in gains[:taken]:
            counts[place] += 1
        return counts

    def _larger(self, rows: int, taken: int, most: int, fits: Fits) -> int:
        """Drafts that make a step of the next size, if it is to be tried again; else 0. It may have been timed while
        the machine was slower, and the first steps of a size may be slow."""
        size = self.times.next_size(rows + taken)
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
