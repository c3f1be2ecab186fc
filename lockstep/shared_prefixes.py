"""Batches of sequences in which shared prefixes are computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple


class Scored(NamedTuple):
    """A sequence, and the position from which its tokens are scored."""

    tokens: tuple[int, ...]
    first: int
    """Position of the first scored token, at least 1."""

    @property
    def computed(self) -> int:
        """Number of computed tokens: all but the last, which predicts no scored token."""
        return len(self.tokens) - 1


def packed_batches(sequences: Sequence[Scored], budget: int) -> Iterator[list[tuple[Scored, int]]]:
    """Batches of at most `budget` computed tokens, and for each sequence the number of leading tokens it omits.

    It omits the prefix that it shares with its lead, the last complete sequence before it in the batch, as
    `pack_scored` expects. `sequences` are sorted, so those with one context are adjacent: the first of them becomes the
    lead if this saves more tokens than continuing with the current one. A sequence longer than `budget` is a batch of
    its own.
    """
    batch: list[tuple[Scored, int]] = []
    size = 0
    lead: Scored | None = None
    for _, group in groupby(sequences, key=lambda sequence: sequence.tokens[: sequence.first]):
        same_context = list(group)
        if lead is not None:
            first, *others = same_context
            same_lead = sum(s.computed - _shared(lead, s) for s in same_context)
            new_lead = first.computed + sum(s.computed - _shared(first, s) for s in others)
            lead = lead if same_lead <= new_lead else None
        for sequence in same_context:
            shared = _shared(lead, sequence) if lead is not None else 0
            if batch and size + sequence.computed - shared > budget:
                yield batch
                batch, size, shared, lead = [], 0, 0, None
            lead = sequence if shared == 0 else lead
            batch.append((sequence, shared))
            size += sequence.computed - shared
    if batch:
        yield batch


def _shared(lead: Scored, sequence: Scored) -> int:
    """Number of leading tokens of `sequence` that `lead` computes, excluding those that predict a scored token."""
    most = min(lead.computed, sequence.first - 1)
    for place, (one, other) in enumerate(zip(lead.tokens[:most], sequence.tokens[:most])):
        if one != other:
            return place
    return most
