"""The interface of a draft: it proposes next tokens, which the engine checks in one pass."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Protocol

from lockstep.generate.sequence import Sequence


class Draft(Protocol):
    """Proposes tokens that the model may draw next. Subclass it, and pass an instance as `Engine(..., draft=...)`.

    A draft changes the speed, never the result: the engine accepts the tokens that equal its draws. With several ranks,
    each has a draft, and all must propose the same tokens.
    """

    cost: float = 0.0
    """What proposing one token for every sequence takes, as a fraction of a step of the model."""

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        """Up to `counts[i]` tokens to follow `sequences[i].tokens`; fewer or none if there are no likely ones."""
        ...

    def verified(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Of the `proposed` tokens of this step, the first `accepted` were accepted."""
        return None

    def ended(self, sequence: Sequence) -> None:
        """The sequence has ended, with its `finish_reason`. Drop all state of it."""
        return None

    def weights_changed(self) -> None:
        """The model has new weights."""
        return None


class FirstOf(Draft):
    """Uses, for each sequence, the first of several drafts that proposes anything."""

    def __init__(self, *drafts: Draft):
        self.drafts = drafts
        self.cost = max(draft.cost for draft in drafts)

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        proposals: list[list[int]] = [[] for _ in sequences]
        for draft in self.drafts:
            open_places = [place for place, proposal in enumerate(proposals) if not proposal]
            new = draft.propose([sequences[p] for p in open_places], [counts[p] for p in open_places])
            for place, proposal in zip(open_places, new, strict=True):
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
