"""What a draft is: a guess at the tokens that come next, which the engine checks in one pass."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Protocol

from lockstep.generate.sequence import Sequence


class Draft(Protocol):
    """Guesses what the model is about to draw. Subclass it, and pass yours as `Engine(..., draft=...)`.

    A guess changes no result, only how soon it comes: the engine keeps those that equal its own draws. On several
    ranks each has one, and all must propose alike.
    """

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        """Up to `counts[i]` tokens to follow `sequences[i].tokens`; fewer, or none, where it knows no better."""
        ...

    def verified(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Of the tokens that were proposed for it in this step, the first `accepted` were drawn."""
        return None

    def ended(self, sequence: Sequence) -> None:
        """It gets no more tokens, as its `finish_reason` says. Keep nothing of it longer than that."""
        return None

    def weights_changed(self) -> None:
        """From here on the model has other weights."""
        return None


class FirstOf(Draft):
    """The first of several that proposes anything for a sequence is taken."""

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
