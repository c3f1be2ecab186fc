"""Which tokens the next step computes, and which pages their keys go to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from lockstep.config import EngineConfig
from lockstep.generate.chunk import Chunk
from lockstep.generate.pages import ROOT, PageAllocator
from lockstep.generate.sequence import Sequence
from lockstep.generate.states import States
from lockstep.ops import CHUNK, NO_STATE


class Scheduler:
    """A waiting and a running queue, with budgets of tokens, sequences and pages.

    A step takes first the sequences that only need their next token, then those whose prompt is partly computed, then
    waiting ones. If pages run out, the newest sequence not yet part of the step is preempted: its pages are freed, and
    it goes to the front of the waiting queue; the keys of its prompt and sampled tokens are recomputed later.

    With delta networks, a sequence can share pages only up to a boundary whose state is kept. States are kept at a
    prompt's last boundary, and at the last boundary of the pages that a sequence finds but cannot share for want of a
    state: its branch, where its chunk ends for that reason.
    """

    def __init__(self, config: EngineConfig, allocator: PageAllocator, page_size: int, states: States):
        self.config = config
        self.allocator = allocator
        self.states = states
        self.page_size = page_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.reused_tokens = 0
        self._slots = list(range(config.max_sequences - 1, -1, -1))
        """Free rows of the engine's arrays."""

    def schedule(self) -> list[Chunk]:
        """The next step's chunks; the pages they fill are allocated and registered."""
        self.states.end_step()
        chunks: list[Chunk] = []
        last: Chunk | None = None
        """The last chunk with rows."""
        budget = self.config.max_tokens_per_step
        scheduled: set[int] = set()
        decoding = [s for s in self.running if len(s.tokens) - s.computed == 1]
        filling = [s for s in self.running if len(s.tokens) - s.computed > 1]
        for sequence in decoding + filling:
            if budget == 0:
                break
            count = self._count(sequence, budget)
            if sequence.slot >= 0 and self._make_room(sequence, count, scheduled):
                chunks.append(last := self._take(sequence, count))
                scheduled.add(id(sequence))
                budget -= count
        while self.waiting and budget and len(self.running) < self.config.max_sequences:
            sequence = self.waiting[0]
            # A chunk that ends its sequence completes the keys in its pages.
            is_copy = last is not None and last.is_sampled and _is_copy(sequence, last.sequence)
            source = last if is_copy and self.config.prefix_cache else None
            self._share_prefix(sequence, source)
            missing = self._pages_for(len(sequence.tokens)) - len(sequence.pages)
            if missing > self.allocator.num_free or self._awaits_state(sequence):
                self._release(sequence)
                break
            self.waiting.popleft()
            sequence.slot = self._slots.pop()
            self.running.append(sequence)
            if source is not None:
                chunks.append(self._take_copy(sequence, source, scheduled))
            else:
                count = self._count(sequence, budget)
                self._make_room(sequence, count, scheduled)
                self.reused_tokens += sequence.computed
                chunks.append(last := self._take(sequence, count))
                budget -= count
            scheduled.add(id(sequence))
        return chunks

    def extend(self, chunk: Chunk, tokens: list[int]) -> None:
        """Adds draft tokens to a chunk, as many as fit in free pages: no sequence is preempted for them."""
        sequence = chunk.sequence
        room = (len(sequence.pages) + self.allocator.num_free) * self.page_size - sequence.computed
        chunk.draft_tokens = tokens[: self.states.most_drafts(chunk, room)]
        self.states.draft(chunk)
        missing = self._pages_for(sequence.computed + len(chunk.draft_tokens)) - len(sequence.pages)
        sequence.pages += [self.allocator.allocate() for _ in range(missing)]

    def accept(self, chunk: Chunk, count: int) -> None:
        """Accepts `count` of a chunk's draft tokens, whose keys are in the cache."""
        chunk.sequence.computed += count
        self.states.accept(chunk, count)
        if self.config.prefix_cache:
            self._register_pages(chunk.sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Frees the pages and slots of finished or aborted sequences."""
        gone = {id(s) for s in sequences}
        for sequence in self.running:
            if id(sequence) in gone:
                self._stop(sequence)
        self.running = [s for s in self.running if id(s) not in gone]
        if any(id(s) in gone for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if id(s) not in gone)

    def unregister_pages(self, sequences: Iterable[Sequence]) -> None:
        """Removes the pages of these sequences from the prefix cache. Their states cannot be found any more either:
        the chains of other pages with the same contents are new."""
        for sequence in sequences:
            for page in sequence.pages:
                self.allocator.unregister(page)

    def restart(self, unfinished: Iterable[Sequence]) -> None:
        """Moves these sequences back to the waiting queue and frees every page, since the computed keys are invalid.

        Nothing of the previous state is used: an interrupt may have left it inconsistent.
        """
        self.allocator.reset()
        self.states.reset()
        self.running = []
        self.waiting = deque(unfinished)
        for sequence in self.waiting:
            sequence.pages, sequence.slot, sequence.state = [], -1, NO_STATE
            self._set_start(sequence, 0, ROOT)
            if (scores := sequence.prompt_scores) is not None and not scores.complete:
                scores.clear()
        self._slots = list(range(self.config.max_sequences - 1, -1, -1))

    def recompute(self, sequences: Iterable[Sequence]) -> None:
        """Moves those of these sequences that run to the front of the waiting queue: their keys are invalid."""
        invalid = {id(s) for s in sequences}
        moved = [s for s in self.running if id(s) in invalid]
        self.running = [s for s in self.running if id(s) not in invalid]
        self.unregister_pages(moved)
        for sequence in reversed(moved):
            self._stop(sequence)
            self.waiting.appendleft(sequence)

    def _make_room(self, sequence: Sequence, count: int, scheduled: set[int]) -> bool:
        """Allocates the pages of the next `count` tokens; False if the sequence itself was preempted or must wait."""
        if sequence.computed + count <= len(sequence.pages) * self.page_size:
            return True
        missing = self._pages_for(sequence.computed + count) - len(sequence.pages)
        while missing > self.allocator.num_free:
            victim = next((s for s in reversed(self.running) if id(s) not in scheduled), sequence)
            if victim is sequence and scheduled and len(sequence.tokens) - sequence.computed > 1:
                return False  # its prompt is partly computed: it keeps its pages and waits for those of this step
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.pages += [self.allocator.allocate() for _ in range(missing)]
        return True

    def _count(self, sequence: Sequence, budget: int) -> int:
        """How many of the sequence's tokens the next chunk takes: up to its branch, if a step would go beyond it."""
        stop = min(len(sequence.tokens), sequence.computed + budget)
        if sequence.computed < sequence.branch <= stop - CHUNK:
            stop = sequence.branch
        return stop - sequence.computed

    def _take(self, sequence: Sequence, count: int) -> Chunk:
        chunk = Chunk(sequence, sequence.computed, count)
        sequence.computed += count
        self.states.advance(chunk)
        if self.config.prefix_cache:
            self._register_pages(sequence)
            boundary, last = (tokens // CHUNK * CHUNK for tokens in (sequence.computed, sequence.prompt_length))
            if chunk.written != NO_STATE and boundary in (sequence.branch, last):
                self.states.keep(sequence)
        return chunk

    def _take_copy(self, sequence: Sequence, source: Chunk, scheduled: set[int]) -> Chunk:
        first = len(sequence.pages)
        self._make_room(sequence, len(sequence.tokens) - sequence.computed, scheduled)
        self.states.fork(source.sequence, sequence)
        self.reused_tokens += len(sequence.tokens)
        sequence.computed = len(sequence.tokens)
        # The source may have more pages, allocated for drafts.
        copies = tuple(zip(source.sequence.pages[first:], sequence.pages[first:], strict=False))
        # Its full pages are registered in its next step: in this one others would read them before they are filled.
        return Chunk(sequence, sequence.computed, 0, copies=copies, copied_slot=source.sequence.slot)

    def _register_pages(self, sequence: Sequence) -> None:
        size = self.page_size
        while (sequence.registered_pages + 1) * size <= sequence.computed:
            start = sequence.registered_pages * size
            tokens = tuple(sequence.tokens[start : start + size])
            sequence.chain = self.allocator.register(sequence.pages[sequence.registered_pages], sequence.chain, tokens)
            sequence.registered_pages += 1
            if sequence.registered_pages * size % CHUNK == 0:
                sequence.boundary_chain = sequence.chain

    def _share_prefix(self, sequence: Sequence, source: Chunk | None) -> None:
        """Shares registered pages that contain the sequence's first tokens; the last token is always computed.

        With delta networks, only up to a state, unless the sequence is to be a copy of the source's.
        """
        size, sequence.chain = self.page_size, sequence.root
        chains = [sequence.root]
        """After the pages up to each boundary."""
        while self.config.prefix_cache and (sequence.registered_pages + 1) * size <= sequence.shareable:
            start = sequence.registered_pages * size
            shared = self.allocator.share(sequence.chain, tuple(sequence.tokens[start : start + size]))
            if shared is None:
                break
            page, sequence.chain = shared
            sequence.pages.append(page)
            sequence.registered_pages += 1
            sequence.computed = sequence.registered_pages * size
            if sequence.computed % CHUNK == 0:
                chains.append(sequence.chain)
        sequence.boundary_chain = chains[-1]
        if self.states.exist and source is None:
            self._share_state(sequence, chains)

    def _share_state(self, sequence: Sequence, chains: list[int]) -> None:
        """Shares the last state that is kept, and only the pages up to it."""
        found = len(chains) - 1
        shared = next((n for n in range(found, 0, -1) if self.states.share(sequence, chains[n])), 0)
        first = shared * CHUNK // self.page_size
        for page in reversed(sequence.pages[first:]):
            self.allocator.release(page)
        del sequence.pages[first:]
        self._set_start(sequence, shared * CHUNK, chains[shared])
        if found > shared:
            sequence.branch, sequence.branch_chain = found * CHUNK, chains[found]

    def _awaits_state(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute the state at this one's branch, which it can share later."""
        chain = sequence.branch_chain
        return chain != ROOT and (
            self.states.is_written(chain)
            or any(s.branch_chain == chain and s.computed < s.branch for s in self.running)
        )

    def _set_start(self, sequence: Sequence, computed: int, chain: int) -> None:
        """Sets what follows from the pages and the state that a sequence starts from."""
        sequence.computed, sequence.registered_pages = computed, computed // self.page_size
        sequence.chain = sequence.boundary_chain = chain
        sequence.branch, sequence.branch_chain = 0, ROOT

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._stop(sequence)
        self.waiting.appendleft(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _release(self, sequence: Sequence) -> None:
        """Releases the sequence's pages and its state."""
        # The last page first, so that the end of a chain is evicted before its beginning.
        for page in reversed(sequence.pages):
            self.allocator.release(page)
        sequence.pages = []
        self.states.release(sequence)
        self._set_start(sequence, 0, ROOT)


def _is_copy(sequence: Sequence, other: Sequence) -> bool:
    """Whether a step that computes all tokens of `other` leaves nothing to compute of `sequence`."""
    scores = sequence.prompt_scores
    scored = scores is None or scores.complete or scores is other.prompt_scores
    return scored and sequence.tokens == other.tokens and sequence.adapter is other.adapter
