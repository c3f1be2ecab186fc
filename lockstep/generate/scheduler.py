"""Which tokens the next step computes, and which pages their keys go to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.config import EngineConfig
from lockstep.generate.pages import ROOT, PageAllocator
from lockstep.generate.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, computed in this step, and drafts at those that follow them."""

    sequence: Sequence
    start: int
    count: int
    draft_tokens: list[int] = field(default_factory=list)
    """Only if the sequence is sampled."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, target) pages, if the last chunk with rows before this one ends a sequence of the same tokens. Then this
    one has no rows: its pages are copied when those are filled, and it is sampled from that chunk's last row."""

    @property
    def rows(self) -> int:
        return self.count + len(self.draft_tokens)

    @property
    def tokens(self) -> list[int]:
        known = self.sequence.tokens[self.start : self.start + self.count]
        return known + self.draft_tokens if self.draft_tokens else known

    @property
    def is_sampled(self) -> bool:
        """Whether the next token of its sequence is drawn in this step, which has not finished."""
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """A waiting and a running queue, with budgets of tokens, sequences and pages.

    A step takes first the sequences that only need their next token, then those whose prompt is partly computed, then
    waiting ones. If pages run out, the newest sequence not yet part of the step is preempted: it gives up its pages and
    goes to the front of the waiting queue; its sampled tokens are kept and recomputed.
    """

    def __init__(self, config: EngineConfig, allocator: PageAllocator, page_size: int):
        self.config = config
        self.allocator = allocator
        self.page_size = page_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.reused_tokens = 0
        self._slots = list(range(config.max_sequences - 1, -1, -1))
        """Free rows of the engine's arrays."""

    def schedule(self) -> list[Chunk]:
        """The next step's chunks; the pages they fill are allocated, and known from now on."""
        chunks: list[Chunk] = []
        lead: Chunk | None = None
        """The last chunk with rows."""
        budget = self.config.max_tokens_per_step
        scheduled: set[int] = set()
        decoding = [s for s in self.running if len(s.tokens) - s.computed == 1]
        filling = [s for s in self.running if len(s.tokens) - s.computed > 1]
        for sequence in decoding + filling:
            if budget == 0:
                break
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if sequence.slot >= 0 and self._make_room(sequence, count, scheduled):
                chunks.append(lead := self._take(sequence, count))
                scheduled.add(id(sequence))
                budget -= count
        while self.waiting and budget and len(self.running) < self.config.max_sequences:
            sequence = self.waiting[0]
            self._share_prefix(sequence)
            missing = self._pages_for(len(sequence.tokens)) - len(sequence.pages)
            if missing > self.allocator.num_free:
                self._release_pages(sequence)
                break
            self.waiting.popleft()
            sequence.slot = self._slots.pop()
            self.running.append(sequence)
            # As there is budget left, the lead ends its sequence: all keys of that are in its pages after this step.
            if self.config.prefix_cache and lead is not None and lead.sequence.tokens == sequence.tokens:
                chunks.append(self._take_copy(sequence, lead, scheduled))
            else:
                count = min(len(sequence.tokens) - sequence.computed, budget)
                self._make_room(sequence, count, scheduled)
                self.reused_tokens += sequence.computed
                chunks.append(lead := self._take(sequence, count))
                budget -= count
            scheduled.add(id(sequence))
        return chunks

    def extend(self, chunk: Chunk, tokens: list[int]) -> None:
        """Adds drafted tokens to a chunk, as many as fit in free pages: no sequence is preempted for a draft."""
        sequence = chunk.sequence
        room = (len(sequence.pages) + self.allocator.num_free) * self.page_size - sequence.computed
        chunk.draft_tokens = tokens[:room]
        missing = self._pages_for(sequence.computed + len(chunk.draft_tokens)) - len(sequence.pages)
        sequence.pages += [self.allocator.allocate() for _ in range(missing)]

    def accept(self, chunk: Chunk, count: int) -> None:
        """`count` of a chunk's drafts are its sequence's tokens: their keys are in the cache."""
        chunk.sequence.computed += count
        if self.config.prefix_cache:
            self._make_known(chunk.sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Frees what finished or aborted sequences hold."""
        gone = {id(s) for s in sequences}
        for sequence in self.running:
            if id(sequence) in gone:
                self._stop(sequence)
        self.running = [s for s in self.running if id(s) not in gone]
        if any(id(s) in gone for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if id(s) not in gone)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """From now on, no other sequence finds the pages of these."""
        for sequence in sequences:
            for page in sequence.pages:
                self.allocator.forget(page)

    def restart(self, unfinished: Iterable[Sequence]) -> None:
        """Moves all of these back to the waiting queue and frees every page: the computed keys are no longer valid.

        The previous state is dropped, since an interrupt may have left it inconsistent.
        """
        self.allocator.reset()
        self.running = []
        self.waiting = deque(unfinished)
        for sequence in self.waiting:
            sequence.pages, sequence.chain, sequence.slot = [], ROOT, -1
            sequence.computed = sequence.known_pages = 0
        self._slots = list(range(self.config.max_sequences - 1, -1, -1))

    def _make_room(self, sequence: Sequence, count: int, scheduled: set[int]) -> bool:
        """Allocates the pages of the next `count` tokens; False if the sequence itself was preempted or must wait."""
        if sequence.computed + count <= len(sequence.pages) * self.page_size:
            return True
        missing = self._pages_for(sequence.computed + count) - len(sequence.pages)
        while missing > self.allocator.num_free:
            victim = next((s for s in reversed(self.running) if id(s) not in scheduled), sequence)
            if victim is sequence and scheduled and len(sequence.tokens) - sequence.computed > 1:
                return False  # its prompt is half computed: it keeps its pages until this step's sequences are done
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.pages += [self.allocator.allocate() for _ in range(missing)]
        return True

    def _take(self, sequence: Sequence, count: int) -> Chunk:
        chunk = Chunk(sequence, sequence.computed, count)
        sequence.computed += count
        if self.config.prefix_cache:
            self._make_known(sequence)
        return chunk

    def _take_copy(self, sequence: Sequence, lead: Chunk, scheduled: set[int]) -> Chunk:
        first = len(sequence.pages)
        self._make_room(sequence, len(sequence.tokens) - sequence.computed, scheduled)
        self.reused_tokens += len(sequence.tokens)
        sequence.computed = len(sequence.tokens)
        # The other may have pages for further tokens, which it once drafted.
        copies = tuple(zip(lead.sequence.pages[first:], sequence.pages[first:], strict=False))
        # Its full pages are known from its next step on: in this one others would read them before they are filled.
        return Chunk(sequence, sequence.computed, 0, copies=copies)

    def _make_known(self, sequence: Sequence) -> None:
        size = self.page_size
        while (sequence.known_pages + 1) * size <= sequence.computed:
            start = sequence.known_pages * size
            tokens = tuple(sequence.tokens[start : start + size])
            sequence.chain = self.allocator.know(sequence.pages[sequence.known_pages], sequence.chain, tokens)
            sequence.known_pages += 1

    def _share_prefix(self, sequence: Sequence) -> None:
        """Shares known pages for as many of the tokens as they cover; the last token is always computed."""
        size = self.page_size
        while self.config.prefix_cache and (sequence.known_pages + 1) * size < len(sequence.tokens):
            start = sequence.known_pages * size
            found = self.allocator.share(sequence.chain, tuple(sequence.tokens[start : start + size]))
            if found is None:
                break
            page, sequence.chain = found
            sequence.pages.append(page)
            sequence.known_pages += 1
            sequence.computed = sequence.known_pages * size

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._stop(sequence)
        self.waiting.appendleft(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self._release_pages(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _release_pages(self, sequence: Sequence) -> None:
        # The last page first, so that the end of a chain is evicted before what it continues.
        for page in reversed(sequence.pages):
            self.allocator.release(page)
        sequence.pages = []
        sequence.computed = sequence.known_pages = 0
        sequence.chain = ROOT
