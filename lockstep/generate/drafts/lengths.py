"""How many tokens to draft for each sequence: as many as its recent acceptance pays for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from lockstep.generate.sequence import Sequence

DECAY = 0.97
"""Decay of the acceptance statistics per checked token."""
INITIAL_RATE = 0.9
"""Acceptance rate before any token was checked."""
PRIOR_WEIGHT = 8
"""Weight, in checked tokens, of the rate over all sequences in the estimate of one sequence's rate."""
LEAST_RATE = 0.02
"""Least probability of a draft token, even of one that costs nothing to check."""
CHOOSE_EVERY = 8
"""Steps between two choices while drafts do not pay: choosing takes up to a millisecond itself."""
RETRY_STEPS = 64
"""Steps in which drafts do not pay before a few sequences try again: their text may have become repetitive."""
CPU_ROWS_PER_THREAD, GPU_ROWS = 5, 200
"""Rows whose arithmetic takes as long as reading the weights, which a step does once: measured on Zen 3 and an H100."""
CPU_MARGIN, GPU_MARGIN = 1.08, 1.25
"""Draft only if the expected throughput is more than this multiple of that without drafts: proposing takes time too,
more of a GPU's short steps."""


def free_rows(device: torch.device) -> int:
    """How many rows take as long as what a step takes whatever its rows. Threads share arithmetic, but not memory."""
    return GPU_ROWS if device.type == "cuda" else CPU_ROWS_PER_THREAD * torch.get_num_threads()


def margin(device: torch.device) -> float:
    return GPU_MARGIN if device.type == "cuda" else CPU_MARGIN


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

    def rate(self, prior: float) -> float:
        """The estimated acceptance rate, with `prior` counting as `PRIOR_WEIGHT` checked tokens."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.checked + PRIOR_WEIGHT)


class DraftLengths:
    """Chooses draft lengths from acceptance rates, without a clock: all ranks of a group choose the same.

    The j-th token of a draft is accepted with the probability rate ** j. A step takes as long as its rows and `free`
    more, so the likeliest token that is left pays as long as its probability exceeds the step's tokens per such row.

    most: tokens per draft; cost: what proposing a token for every sequence takes, as a fraction of a step; padded: how
    many rows a step of so many computes.
    """

    def __init__(
        self,
        most: int,
        free: int,
        margin: float = CPU_MARGIN,
        cost: float = 0.0,
        padded: Callable[[int], int] = lambda rows: rows,
    ):
        self.most = most
        self._free, self._margin, self._cost, self._padded = free, margin, cost, padded
        self._all = Acceptance()
        self._per_sequence: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()
        self._steps_without = 0
        """Steps since drafts last paid."""

    def skips(self) -> bool:
        """Whether to draft nothing in this step, without a choice."""
        if self._steps_without % CHOOSE_EVERY == 0:
            return False
        self._steps_without += 1
        return True

    def choose(self, sequences: ListLike[Sequence], limits: ListLike[int], rows: int, room: int) -> list[int]:
        """Tokens to draft per sequence, at most `limits[i]` and `room` in all; `rows`: the step's rows without
        drafts, of which those of prompts have to be computed in any case."""
        tokens, padding = float(len(sequences)), self._padded(rows) - rows
        plain = tokens / (self._free + tokens + padding)
        each, best, count = self._cost / plain if plain else 0.0, self._margin * plain, 0
        likeliest = self._likeliest(sequences, limits, LEAST_RATE if padding else plain)[:room]
        for more, (probability, _) in enumerate(likeliest, 1):
            tokens += probability
            computed = len(sequences) + self._padded(rows + more) - rows
            rate = tokens / (self._free + computed + each * more)
            if rate > best:
                best, count = rate, more
        counts = [0] * len(sequences)
        for _, place in likeliest[:count]:
            counts[place] += 1
        self._steps_without = 0 if count else self._steps_without + 1
        if self._steps_without > RETRY_STEPS:
            self._steps_without = 0
            for place in sorted(range(len(limits)), key=lambda place: -limits[place])[: 1 + len(limits) // 16]:
                counts[place] = min(2, limits[place], room)
                room -= counts[place]
        return counts

    def _likeliest(self, sequences: ListLike[Sequence], limits: ListLike[int], least: float) -> list[tuple[float, int]]:
        """The draft tokens of more than this probability, and the places of their sequences: the likeliest first."""
        prior, unknown = self._all.rate(INITIAL_RATE), Acceptance()
        tokens = []
        for place, (sequence, limit) in enumerate(zip(sequences, limits)):
            rate = probability = self._per_sequence.get(sequence, unknown).rate(prior)
            for _ in range(min(limit, self.most)):
                if probability <= least:
                    break
                tokens.append((probability, place))
                probability *= rate
        tokens.sort(key=operator.itemgetter(0), reverse=True)
        return tokens

    def verified(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Of the `proposed` tokens of this step, the first `accepted` were accepted."""
        self._per_sequence.setdefault(sequence, Acceptance()).update(proposed, accepted)
        self._all.update(proposed, accepted)
