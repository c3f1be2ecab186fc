"""How much the completions of a prompt differ from each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

PAIRS = 32
"""Most pairs compared per group: all pairs for up to eight completions."""


def distinct_share(group: Sequence[Sequence[int]]) -> float:
    """The fraction of a group's completions that are distinct, by their tokens."""
    return len({tuple(tokens) for tokens in group}) / len(group)


def pairwise_overlap(group: Sequence[Sequence[int]]) -> float:
    """The mean overlap of two completions of a group: the Jaccard index |A ∩ B| / |A ∪ B| of their sets of bigrams.

    A completion's bigrams are its pairs of consecutive tokens, including a start marker with its first token, so a
    single token has one. 1: all are the same; 0: no bigram is shared, also for a group of one. In larger groups `PAIRS`
    pairs are compared: neighbors first, then those two apart, and so on.
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
