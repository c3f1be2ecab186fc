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
from lockstep.generate.runner import Runner, make_cache, sampler_of
from lockstep.generate.sequence import Sequence
from lockstep.model import Decoder


class ModelDraft(Draft):
    """Decodes with `model` a few steps ahead of each sequence, with the random draws of the sequence itself.

    It has a separate cache, as large as the engine's. If the model is sharded over ranks, all of them call it.
    """

    def __init__(self, model: Decoder, config: EngineConfig, cost: float = 0.0):
        self.model = model
        self.cost = cost
        self._budget = config.max_tokens_per_step
        self._allocator = PageAllocator(config.cache_tokens // ops.PAGE)
        self._runner = Runner(model, make_cache(model, self._allocator.num_pages))
        self._sampler = sampler_of(model)
        self._arrays = BatchArrays(config.max_sequences)
        self._slots = list(range(config.max_sequences))
        self._copies: dict[Sequence, Sequence] = {}
        """For each of the engine's sequences, a copy whose tokens are followed by drafts."""

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        self._release(s for s in list(self._copies) if s.finish_reason is not None)
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
            copy = self._copies[sequence] = replace(sequence, tokens=[], pages=[], slot=self._slots.pop(), computed=0)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(copy.tokens, sequence.tokens)))
        copy.computed = min(copy.computed, same, len(sequence.tokens) - 1)
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
            batch = self._arrays.prepare(chunks).to(self.model.device)
            hidden = self._runner.hidden(batch)
            for chunk in chunks:
                chunk.sequence.computed += chunk.count
            pending = [sequence for sequence in pending if sequence.computed < len(sequence.tokens)]
            if batch.sampled:
                logits = self.model.logits(hidden[batch.sampled_rows])
                tokens = self._sampler.sample(logits, *batch.sampling)[0].tolist()
                for chunk, token in zip(batch.sampled, tokens):
                    chunk.sequence.tokens.append(token)
