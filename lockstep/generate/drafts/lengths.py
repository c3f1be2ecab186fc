"""How many tokens to propose for each sequence: as many as raise throughput, given recent acceptance."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from lockstep.generate.drafts.step_times import Padded, StepTimes, Usual, unpadded
from lockstep.generate.sequence import Sequence

MEMORY = 0.97
"""Decay of the acceptance statistics per checked token."""
FIRST_CHANCE = 0.7
PRIOR = 8
"""Checked tokens that the statistics over all sequences count as, next to a sequence's own."""
MARGIN = 1.08
"""Draft only if the expected throughput is this multiple of that without drafts: less is noise."""
LONGEST_REST = 64
"""Steps without a draft, after which a few sequences try again; after drafts that were all wrong, up to MOST_REST."""
MOST_REST = 256
REST_WITHOUT_A_DRAFT = 8
"""The same if the draft had no draft."""
TRIED_AGAIN, SELDOM = 16, 256
"""Choices that pay, after which one is of the next larger size: at first, then twice as many each time, and at last."""
SOON = 2
"""The same if that size is new."""
IN_VAIN = 0.02
"""Fraction of the time of steps without drafts that it may take to find that they do not pay."""
WAKING = 0.75
"""Fraction of the number of sequences at which drafts did not pay: with fewer, rows cost less."""
LEAST_GAIN = 0.02
"""Expected tokens below which a draft is not considered, whatever a row costs."""
KEPT = 3
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
        kept = MEMORY**checked
        self.accepted = self.accepted * kept + accepted
        self.checked = self.checked * kept + checked

    def chance(self, prior: float, weight: float) -> float:
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
        self._paying, self._tried_after = 0, TRIED_AGAIN
        """Choices that pay since one was of the next larger size, and the number after which another is."""
        self.times = StepTimes(padded)
        self._all = Acceptance()
        self._own: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()
        self._rest = self._rested = self._paid_not_for = 0
        self._longest = LONGEST_REST
        self._recovering = 0
        """Steps without a draft after which what was spent in vain is a small part of them."""
        self._plain = 0.0
        """Seconds of a step without drafts."""
        self._choosing = Usual()
        """Seconds that it takes to choose lengths."""
        self._drafting = Usual()
        """Seconds that it takes to draft one token of every sequence."""
        self._spent = 0.0
        """Seconds that it usually takes to choose and to draft as was done last."""
        self._chosen: list[int] = []
        self._chosen_for: tuple[int, list[int]] = 0, []
        """Rows and sequences that lengths were last chosen for."""
        self._kept = 0
        """Further steps for which these lengths stay."""
        self._held = self._stays = False
        """Whether some draft was right since the last choice, and whether lengths stay if none was."""

    def rests(self, sequences: int) -> bool:
        """Whether to skip drafting in this step, since it did not pay recently with about as many sequences."""
        self._rested += 1
        dear = sequences > self._paid_not_for * WAKING
        resting = self._rested <= self._recovering or (self._rested <= self._rest and dear)
        if resting:
            self._kept = 0
        return resting

    def spent_in_vain(self) -> None:
        """Drafts were found not to pay in this step, and maybe some were tried."""
        self._recovering = min(MOST_REST, int(self._spent / (IN_VAIN * self._plain))) if self._plain else 0

    def chose(self, seconds: float) -> None:
        """It took so long to choose."""
        self._spent = self._choosing.follow(seconds) if self.compared else 0.0

    def choose(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits = any_rows
    ) -> list[int]:
        """Tokens to draft per sequence, at most `limits[i]` and `room` in all; `rows`: the step's rows without them.

        What is chosen stays for a few steps if it pays, since to choose takes long.
        """
        chosen_for, held, self._held = (rows, list(map(id, sequences))), self._held, False
        self.compared = False
        kept = list(map(min, self._chosen, limits))
        if self._kept and (held or self._stays) and chosen_for == self._chosen_for and sum(kept) <= room:
            self._kept -= 1
            return kept
        self._kept, self._stays, self._chosen_for = 0, False, chosen_for
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
            self.trying, self._recovering = False, 0
            return counts
        self._begin_rest(len(sequences), self._longest)
        if self._rest < self._longest:
            return none
        counts = self._trial(sequences, limits, rows, room, fits)
        if self.times.may_be_faster(rows + sum(counts)):
            self._kept = KEPT
        return counts

    def drafted(self, asked: ListLike[int], proposed: int, seconds: float, sequences: int) -> None:
        """`asked` tokens were requested and `proposed` came; to draft for all sequences took so many seconds."""
        share = sum(asked) / sequences
        self._spent += share * self._drafting.follow(seconds / share)
        if proposed:
            self._rest = self._rested = self._paid_not_for = 0
            self._longest = min(2 * self._longest, MOST_REST)  # until one is right
        else:
            self._rest = min(self._rest, REST_WITHOUT_A_DRAFT)
            self._begin_rest(sequences, REST_WITHOUT_A_DRAFT)

    def _begin_rest(self, sequences: int, longest: int) -> None:
        self._paid_not_for = sequences
        self._rest, self._rested = min(max(1, 2 * self._rest), max(longest, self._rest)), 0

    def verified(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        self._own.setdefault(sequence, Acceptance()).update(proposed, accepted)
        self._all.update(proposed, accepted)
        if accepted:
            self._longest, self._held = LONGEST_REST, True
            if self._kept:  # a try that goes on was not in vain
                self._recovering = 0

    def _best(
        self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int, fits: Fits
    ) -> list[int]:
        # Mostly plain Python: with few sequences, when drafts pay most, NumPy's calls would take a tenth of a step.
        prior, nothing = self._all.chance(FIRST_CHANCE, PRIOR), Acceptance()
        weights = _weights(sequences)
        gains: list[tuple[float, int]] = []
        for place, (sequence, limit) in enumerate(zip(sequences, limits)):
            gain, chance = weights[place], self._own.get(sequence, nothing).chance(prior, PRIOR)
            for _ in range(min(limit, self.most)):
                gain *= chance
                if gain < LEAST_GAIN:
                    break
                gains.append((gain, place))
        gains.sort(key=operator.itemgetter(0), reverse=True)
        del gains[room:]
        more = np.arange(len(gains) + 1)
        expected = np.cumsum([sum(weights), *(gain for gain, _ in gains)])
        seconds = self.times.of(rows + more) + self._drafting.mean * more / len(sequences)
        self._plain = float(seconds[0])
        seconds[1:] += self._choosing.mean / (1 + KEPT)
        rates = expected / seconds
        rates[0] *= MARGIN
        while (taken := int(np.argmax(rates))) and not fits(rows + taken):
            rates[taken] = 0.0
        if taken:
            self._kept, self._stays = KEPT, self.times.is_lasting(rows + taken)
        self._paying += taken > 0
        if taken and (larger := self._larger(rows, taken, len(gains), fits)):
            taken, self._kept, self._paying = larger, 0, 0
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
        if self._paying >= SOON and self.times.is_new(size):
            return size - rows
        if self._paying < self._tried_after:
            return 0
        self._tried_after = min(SELDOM, 2 * self._tried_after)
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
