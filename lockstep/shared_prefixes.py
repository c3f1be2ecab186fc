"""Which sequences go through the model together, so that shared prefixes are computed once."""

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
        """Tokens that are computed: the last one predicts nothing that is scored."""
        return len(self.tokens) - 1


def packed_batches(sequences: Sequence[Scored], budget: int) -> Iterator[list[tuple[Scored, int]]]:
    """Batches of at most `budget` computed tokens, and for each sequence how many first tokens it leaves out.

    Those are the prefix that it shares with the last sequence before it in its batch that leaves out none, as
    `pack_scored` expects. `sequences` are sorted, so those of one context are adjacent: the first of them becomes the
    one that others share with if this saves more than keeping the one before. A sequence longer than `budget` is a
    batch by itself.
    """
    batch: list[tuple[Scored, int]] = []
    held = 0
    lead: Scored | None = None
    for _, group in groupby(sequences, key=lambda sequence: sequence.tokens[: sequence.first]):
        own = list(group)
        if lead is not None:
            going_on = sum(s.computed - _shared(lead, s) for s in own)
            anew = own[0].computed + sum(s.computed - _shared(own[0], s) for s in own[1:])
            lead = lead if going_on <= anew else None
        for sequence in own:
            shared = _shared(lead, sequence) if lead is not None else 0
            if batch and held + sequence.computed - shared > budget:
                yield batch
                batch, held, shared, lead = [], 0, 0, None
            lead = sequence if shared == 0 else lead
            batch.append((sequence, shared))
            held += sequence.computed - shared
    if batch:
        yield batch


def _shared(lead: Scored, sequence: Scored) -> int:
    """Number of first tokens of `sequence` that `lead` has computed, excluding those that predict a scored one."""
    most = min(lead.computed, sequence.first - 1)
    for place, (one, other) in enumerate(zip(lead.tokens[:most], sequence.tokens[:most])):
        if one != other:
            return place
    return most
