"""Which states of delta networks sequences read and write, and which the prefix cache keeps (`ops.DeltaCache`)."""

from __future__ import annotations

from lockstep.generate.chunk import Chunk
from lockstep.generate.pages import PageAllocator
from lockstep.generate.sequence import Sequence
from lockstep.ops import CHUNK, NO_STATE


class States:
    """References to entries of a `DeltaCache`; none if the model has no delta networks.

    A sequence has a reference to the state at its last boundary. A step that crosses a boundary writes another entry,
    and the former one stays in use until the step is over, so that no step writes what it reads. A kept state is found
    by the chain of pages up to its boundary, once the step that writes it is over.

    kept: how many states that no sequence uses may be kept.
    """

    def __init__(self, entries: int = 0, kept: int = 0):
        self.allocator = PageAllocator(entries, most_unused=kept)
        self.exist = entries > 0
        self._read: list[int] = []
        """Entries to release when the step is over."""
        self._written: list[tuple[int, int]] = []
        """Entries to register when the step is over, and the chains to find them by."""

    def end_step(self) -> None:
        """Registers what the step has written, and releases what only the step has used."""
        for entry, chain in self._written:
            self.allocator.register(entry, chain, ())
            self.allocator.release(entry)
        for entry in self._read:
            self.allocator.release(entry)
        self._read, self._written = [], []

    def advance(self, chunk: Chunk) -> None:
        """Moves a sequence's state to the last boundary up to the end of the chunk's known tokens."""
        sequence = chunk.sequence
        chunk.read = sequence.state
        if self.exist and _crosses(chunk.start, chunk.end):
            chunk.written = self.allocator.allocate()
            if sequence.state != NO_STATE:
                self._read.append(sequence.state)
            sequence.state = chunk.written

    def keep(self, sequence: Sequence) -> None:
        """Keeps the state that this step writes, for sequences that begin with the same tokens."""
        self.allocator.retain(sequence.state)
        self._written.append((sequence.state, sequence.boundary_chain))

    def most_drafts(self, chunk: Chunk, room: int) -> int:
        """How many of `room` draft tokens may follow a chunk. A step writes one state of a sequence: if that is a state
        of known tokens, drafts must not cross another boundary."""
        if not self.exist:
            return room
        return min(room, CHUNK if chunk.written == NO_STATE else CHUNK - 1 - chunk.end % CHUNK)

    def draft(self, chunk: Chunk) -> None:
        """If the chunk's draft tokens cross a boundary, gives it an entry to write, which it loses unless it is
        accepted."""
        if self.exist and _crosses(chunk.end, chunk.end + len(chunk.draft_tokens)):
            chunk.written = self.allocator.allocate()
            self._read.append(chunk.written)

    def accept(self, chunk: Chunk, count: int) -> None:
        """Moves a sequence's state to the last boundary up to the end of its accepted draft tokens."""
        if self.exist and _crosses(chunk.end, chunk.end + count):
            self.allocator.retain(chunk.written)
            self.release(chunk.sequence)
            chunk.sequence.state = chunk.written

    def share(self, sequence: Sequence, chain: int) -> bool:
        """Gives the sequence the state that is kept for a chain, if there is one."""
        found = self.allocator.share(chain, ())
        if found is not None:
            sequence.state = found[0]
        return found is not None

    def fork(self, source: Sequence, sequence: Sequence) -> None:
        """Gives a sequence the state of another one with the same tokens."""
        sequence.state = source.state
        if sequence.state != NO_STATE:
            self.allocator.retain(sequence.state)

    def is_written(self, chain: int) -> bool:
        """Whether the state to be found by this chain is written in this step."""
        return any(chain == each for _, each in self._written)

    def release(self, sequence: Sequence) -> None:
        if sequence.state != NO_STATE:
            self.allocator.release(sequence.state)
            sequence.state = NO_STATE

    def reset(self) -> None:
        """Frees every entry."""
        self.allocator.reset()
        self._read, self._written = [], []


def _crosses(start: int, end: int) -> bool:
    """Whether there is a boundary behind `start`, up to `end`."""
    return end // CHUNK > start // CHUNK
