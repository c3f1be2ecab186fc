"""Guesses from the sequence itself: what followed its last tokens when they stood there before."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from weakref import WeakKeyDictionary

import numpy as np

from lockstep.generate.drafts.draft import Draft
from lockstep.generate.sequence import Sequence


class NGramDraft(Draft):
    """Looks the last tokens up in prompt and output: the longest match, and of these the latest.

    shortest: a match of fewer tokens proposes nothing; longest: more of them are not compared. After prompt lookup
    decoding (Saxena 2023), and n-gram speculation in vLLM.
    """

    def __init__(self, shortest: int = 2, longest: int = 8):
        self.shortest, self.longest = shortest, longest
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        return [self._propose(sequence, count) for sequence, count in zip(sequences, counts)]

    def _propose(self, sequence: Sequence, count: int) -> list[int]:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text()
        tokens = text.grown_to(sequence.tokens)
        if len(tokens) <= self.shortest or not count:
            return []
        # Where the text that ends with each of `ends` agrees with its own end, so far.
        ends, matched = np.flatnonzero(tokens[:-1] == tokens[-1]), 1
        while matched < self.longest:
            earlier = ends[ends >= matched]
            longer = earlier[tokens[earlier - matched] == tokens[-1 - matched]]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        if not len(ends) or matched < self.shortest:
            return []
        following = tokens[ends[-1] + 1 :][:count].tolist()
        # What repeats with a period shorter than the guess goes on repeating.
        return (following * (-(-count // len(following))))[:count]


class _Text:
    """A sequence's tokens in an array that grows with it."""

    def __init__(self) -> None:
        self._buffer, self._length = np.empty(64, dtype=np.int64), 0

    def grown_to(self, tokens: list[int]) -> np.ndarray:
        length = len(tokens)
        if length > len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty(2 * length - len(self._buffer), dtype=np.int64)))
        self._buffer[self._length : length] = tokens[self._length :]
        self._length = length
        return self._buffer[:length]
