"""Drafts from the sequence itself: what followed an earlier occurrence of its last tokens."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from weakref import WeakKeyDictionary

from lockstep.generate.drafts.draft import Draft
from lockstep.generate.sequence import Sequence


class NGramDraft(Draft):
    """Looks up the last tokens in prompt and output: the longest match of at most `longest` tokens, and its latest
    place.

    A match of fewer than `shortest` tokens proposes nothing. After prompt lookup decoding (Saxena 2023).
    """

    def __init__(self, shortest: int = 2, longest: int = 3):
        self.lengths = range(longest, shortest - 1, -1)
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        return [self._propose(sequence, count) for sequence, count in zip(sequences, counts)]

    def _propose(self, sequence: Sequence, count: int) -> list[int]:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text()
        tokens = sequence.tokens
        text.follow(tokens, self.lengths)
        for length in self.lengths:
            if start := text.after.get(tuple(tokens[-length:])):
                following = tokens[start : start + count]
                # A text whose period is shorter than the draft is assumed to keep repeating.
                return (following * (-(-count // len(following))))[:count]
        return []


class _Text:
    """Where each n-gram of a growing text was last followed by a token."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        self._read = 0

    def follow(self, tokens: list[int], lengths: range) -> None:
        # Nothing follows the last token yet.
        for start in range(max(1, self._read), len(tokens)):
            for length in lengths:
                if length <= start:
                    self.after[tuple(tokens[start - length : start])] = start
        self._read = len(tokens)
