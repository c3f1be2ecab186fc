"""Drafts from a smaller model, with the random draws of the sequence itself."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import replace
from itertools import takewhile

from lockstep import ops
from lockstep.config import EngineConfig
from lockstep.generate.batch import BatchArrays
from lockstep.generate.chunk import Chunk
from lockstep.generate.drafts.draft import Draft
from lockstep.generate.pages import PageAllocator
from lockstep.generate.runner import Runner, delta_sizes, make_cache, sampler_of
from lockstep.generate.sequence import Sequence
from lockstep.model import Decoder


class _States:
    """The last two states of each copy: the draft tokens that led to the last one may have been wrong."""

    def __init__(self, sizes: ops.DeltaSizes, model: Decoder, config: EngineConfig):
        slots, drafts = config.max_sequences, min(config.draft_tokens, ops.CHUNK)
        self.cache = ops.DeltaCache(sizes, 2 * slots, slots, model.dtype, model.device, drafts)
        self._boundaries = [[0, 0] for _ in range(slots)]
        """Of each slot's two states; 0: none."""

    def has(self, copy: Sequence) -> bool:
        """Whether the tokens after those that are computed can follow at once."""
        boundary = _boundary(copy.computed)
        return not boundary or boundary in self._boundaries[copy.slot]

    def advance(self, chunk: Chunk) -> None:
        slot, boundary, last = chunk.sequence.slot, _boundary(chunk.start), _boundary(chunk.end)
        boundaries = self._boundaries[slot]
        if not boundary:  # another sequence, or new weights
            boundaries[:] = [0, 0]
        place = boundaries.index(boundary) if boundary else 1
        chunk.read = 2 * slot + place if boundary else ops.NO_STATE
        if last > boundary:
            chunk.written = 2 * slot + 1 - place
            boundaries[1 - place] = last


def _boundary(tokens: int) -> int:
    return tokens // ops.CHUNK * ops.CHUNK


class ModelDraft(Draft):
    """Decodes with `model` a few steps ahead of each sequence, with the random draws of the sequence itself.

    It has a separate cache, as large as the engine's. If the model is sharded over ranks, all of them call it.
    """

    def __init__(self, model: Decoder, config: EngineConfig, cost: float = 0.0):
        self.model = model
        self.cost = cost
        self._budget = config.max_tokens_per_step
        self._allocator = PageAllocator(config.cache_tokens // ops.PAGE)
        sizes, cache = delta_sizes(model), make_cache(model, self._allocator.num_pages)
        self._states = None if sizes is None else _States(sizes, model, config)
        self._runner = Runner(model, cache, None if self._states is None else self._states.cache)
        self._sampler = sampler_of(model)
        self._arrays = BatchArrays(config.max_sequences)
        self._slots = list(range(config.max_sequences))
        self._copies: dict[Sequence, Sequence] = {}
        """For each of the engine's sequences, a copy whose tokens are followed by drafts."""

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        self._release(s for s in list(self._copies) if s.finish_reason is not None)
        counts = counts if self._states is None else [min(count, ops.CHUNK) for count in counts]
        fitting = {s: count for s, count in zip(sequences, counts) if self._make_room(s, count, sequences)}
        for place in range(max(fitting.values(), default=0)):
            self._draw([self._copies[s] for s, count in fitting.items() if place < count])
        return [self._copies[s].tokens[len(s.tokens) :] if s in fitting else [] for s in sequences]

    def weights_changed(self) -> None:
        for copy in self._copies.values():
            copy.computed = 0

    def _make_room(self, sequence: Sequence, count: int, requested: ListLike[Sequence]) -> bool:
        """Updates the sequence's copy; False if `count` more tokens do not fit, at all or at present."""
        length = len(sequence.tokens) + count
        if length > self.model.config.max_positions:
            return False
        copy = self._copies.get(sequence)
        if copy is None:
            if not self._slots:
                self._release([next(s for s in self._copies if s not in requested)])
            copy = self._copies[sequence] = replace(
                sequence, tokens=[], pages=[], slot=self._slots.pop(), computed=0, adapter=None
            )
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(copy.tokens, sequence.tokens)))
        copy.computed = min(copy.computed, same, len(sequence.tokens) - 1)
        if self._states is not None and not self._states.has(copy):
            copy.computed = 0
        copy.tokens = list(sequence.tokens)
        missing = -(-length // ops.PAGE) - len(copy.pages)
        idle = (s for s in list(self._copies) if s not in requested)
        while missing > self._allocator.num_free:
            if (victim := next(idle, None)) is None:
                return False
            self._release([victim])
        copy.pages += [self._allocator.allocate() for _ in range(missing)]
        return True

    def _release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            copy = self._copies.pop(sequence)
            self._slots.append(copy.slot)
            for page in copy.pages:
                self._allocator.release(page)

    def _draw(self, pending: list[Sequence]) -> None:
        """Draws one more token for each sequence, after computing the tokens that are missing in its cache."""
        while pending:
            chunks, budget = [], self._budget
            for sequence in pending:
                if count := min(len(sequence.tokens) - sequence.computed, budget):
                    chunks.append(Chunk(sequence, sequence.computed, count))
                    budget -= count
                    if self._states is not None:
                        self._states.advance(chunks[-1])
            batch = self._arrays.prepare(chunks).to(self.model.device)
            hidden = self._runner.hidden(batch)
            for chunk in chunks:
                chunk.sequence.computed += chunk.count
            pending = [sequence for sequence in pending if sequence.computed < len(sequence.tokens)]
            if batch.sampled:
                logits = self._runner.logits(batch, hidden, batch.sampled_rows)
                tokens = self._sampler.sample(logits, *batch.sampling)[0].tolist()
                for chunk, token in zip(batch.sampled, tokens):
                    chunk.sequence.tokens.append(token)
