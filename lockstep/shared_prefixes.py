"""Which sequences go through the model together, so that what several begin with is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple


class Scored(NamedTuple):
    """A sequence, and from where on its tokens are scored."""

    tokens: tuple[int, ...]
    first: int
    """Position of the first scored token, at least 1."""

    @property
    def computed(self) -> int:
        """Tokens that are computed: the last one predicts nothing that is scored."""
        return len(self.tokens) - 1


def packed_batches(sequences: Sequence[Scored], budget: int) -> Iterator[list[tuple[Scored, int]]]:
    """Batches of at most `budget` computed tokens, and of each sequence how many first tokens it leaves out.

    Those are what it has in common with the last sequence before it in its batch that leaves out none, as `pack_scored`
    takes them. `sequences` are sorted. Those of one context stand together: the first of them becomes the one that
    others share with where this saves more than going on with the one before. A longer sequence than `budget` is a
    batch of its own.
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
    """First tokens of `sequence` that `lead` has computed, short of what predicts a scored one."""
    most = min(lead.computed, sequence.first - 1)
    for place, (one, other) in enumerate(zip(lead.tokens[:most], sequence.tokens[:most])):
        if one != other:
            return place
    return most
