"""A sequence's tokens in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.generate.sequence import Sequence
from lockstep.ops import NO_STATE


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, computed in this step, and draft tokens after them."""

    sequence: Sequence
    start: int
    count: int
    draft_tokens: list[int] = field(default_factory=list)
    """Only if the sequence is sampled."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, target) pages, if the last chunk with rows before this one ends a sequence of the same tokens. This
    chunk then has no rows: its pages are copied from that sequence's, and it is sampled from that chunk's last row."""
    copied_slot: int = -1
    """The slot of that sequence."""
    read: int = NO_STATE
    """The entry of the state at the last boundary up to `start`."""
    written: int = NO_STATE
    """The entry for the state at the last boundary up to the end of the chunk, if this is another."""

    @property
    def end(self) -> int:
        """The end of the known tokens."""
        return self.start + self.count

    @property
    def rows(self) -> int:
        return self.count + len(self.draft_tokens)

    @property
    def tokens(self) -> list[int]:
        known = self.sequence.tokens[self.start : self.end]
        return known + self.draft_tokens if self.draft_tokens else known

    @property
    def is_sampled(self) -> bool:
        """Whether this step samples the sequence's next token; valid until the step appends it."""
        return self.end == len(self.sequence.tokens)
