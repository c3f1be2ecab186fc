"""The interface of a draft: it drafts the next tokens, which the engine checks in one pass."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Protocol

from lockstep.generate.sequence import Sequence


class Draft(Protocol):
    """Drafts what the model will draw next. Subclass it, and pass yours as `Engine(..., draft=...)`.

    A draft never changes a result, only how soon it comes: the engine keeps the drafts that equal its own draws. With
    several ranks, each has a draft, and all must propose the same tokens.
    """

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        """Up to `counts[i]` tokens to follow `sequences[i].tokens`; fewer, or none, if it has no good draft."""
        ...

    def verified(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Of the tokens that were proposed for it in this step, the first `accepted` were drawn."""
        return None

    def ended(self, sequence: Sequence) -> None:
        """The sequence gets no more tokens, for its `finish_reason`. Drop everything kept for it."""
        return None

    def weights_changed(self) -> None:
        """From now on, the model has other weights."""
        return None


class FirstOf(Draft):
    """Uses, for each sequence, the first of several drafts that proposes anything."""

    def __init__(self, *drafts: Draft):
        self.drafts = drafts

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        proposals: list[list[int]] = [[] for _ in sequences]
        for draft in self.drafts:
            open_places = [place for place, proposal in enumerate(proposals) if not proposal]
            own = draft.propose([sequences[p] for p in open_places], [counts[p] for p in open_places])
            for place, proposal in zip(open_places, own, strict=True):
                proposals[place] = proposal
        return proposals

    def verified(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        for draft in self.drafts:
            draft.verified(sequence, proposed, accepted)

    def ended(self, sequence: Sequence) -> None:
        for draft in self.drafts:
            draft.ended(sequence)

    def weights_changed(self) -> None:
        for draft in self.drafts:
            draft.weights_changed()
