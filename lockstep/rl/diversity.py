"""How different the completions of a prompt are from each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

PAIRS = 32
"""Of a group, compared at most: all of up to eight completions."""


def distinct_share(group: Sequence[Sequence[int]]) -> float:
    """Different completions of a group as a share of all of them, by their tokens."""
    return len({tuple(tokens) for tokens in group}) / len(group)


def pairwise_overlap(group: Sequence[Sequence[int]]) -> float:
    """The mean overlap of two completions of a group: the Jaccard index |A ∩ B| / |A ∪ B| of their sets of bigrams.

    A completion's bigrams are its pairs of consecutive tokens, its first token with its beginning included, so that one
    of a single token has one. 1: all say the same; 0: no two tokens in a row are shared, and so for a group of one. Of
    larger groups `PAIRS` pairs are compared: neighbours first, then every second one, and so on.
    """
    bigrams = [set(zip([None, *tokens], tokens)) for tokens in group]
    overlaps = [_jaccard(bigrams[first], bigrams[second]) for first, second in _pairs(len(group))]
    return sum(overlaps) / len(overlaps) if overlaps else 0.0


def _jaccard(first: set[tuple[int | None, int]], second: set[tuple[int | None, int]]) -> float:
    together = len(first | second)
    return len(first & second) / together if together else 1.0


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    pairs = ((first, first + apart) for apart in range(1, count) for first in range(count - apart))
    return (pair for pair, _ in zip(pairs, range(PAIRS)))
