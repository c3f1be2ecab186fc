"""One step's tensors, prepared from arrays that persist between steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import ops
from lockstep.generate.adjustments import Adjustment
from lockstep.generate.chunk import Chunk
from lockstep.generate.prompt_scores import PromptRows, prompt_rows
from lockstep.generate.sampling_params import SamplingParams
from lockstep.generate.sequence import Sequence
from lockstep.model.adapted_rows import AdaptedRows
from lockstep.model.adapters import Adapter


@dataclass
class StepBatch:
    """The inputs of the model and the sampler."""

    tokens: Tensor
    positions: Tensor
    block_table: Tensor
    query_lengths: Tensor
    context_lengths: Tensor
    sampled: list[Chunk]
    """The chunks whose sequences are sampled in this step: after their last token, and after each draft token."""
    sampled_rows: Tensor
    """The rows that are sampled, chunk after chunk."""
    sampling: tuple[Tensor, ...]
    """Temperature, top_k, top_p, min_p and uniform draw of each of these rows."""
    copies: list[tuple[int, int]]
    """(source, target) pages that are copied after this step."""
    slot_copies: list[tuple[int, int]]
    """The slots of the sequences that these pages are of."""
    states: Tensor
    """Slot, entry that is read and entry that is written of each sequence with rows, int32 `[3, sequences]`."""
    decodes: bool
    """Whether every row is sampled."""
    prompt_rows: list[PromptRows]
    """The rows after which a token of a prompt follows whose log-probability is requested."""
    adapted: list[AdaptedRows]
    """The rows of each adapter; empty if no row has one."""

    @cached_property
    def params(self) -> list[SamplingParams]:
        """The sampling parameters of each sampled row."""
        return [params for chunk in self.sampled for params in [chunk.sequence.params] * (1 + len(chunk.draft_tokens))]

    @cached_property
    def adjustments(self) -> list[Adjustment | None]:
        """What changes the logits of each sampled row; rows with drafts have nothing that does."""
        runs = [(chunk.sequence.adjustment, 1 + len(chunk.draft_tokens)) for chunk in self.sampled]
        return [adjustment for adjustment, count in runs for _ in range(count)]

    def table_of_rows(self) -> Tensor:
        """The pages of each row's sequence."""
        if self.block_table.shape[0] == self.tokens.shape[0]:
            return self.block_table
        return self.block_table.repeat_interleave(self.query_lengths.long(), 0)

    def to(self, device: torch.device) -> StepBatch:
        """This batch on another device."""
        tensors: Any = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        adapted = [AdaptedRows(a, None if rows is None else rows.to(device)) for a, rows in self.adapted]
        sampling = tuple(t.to(device) for t in self.sampling)
        return dataclasses.replace(self, **tensors, sampling=sampling, adapted=adapted)


class BatchArrays:
    """One row per running sequence: its pages and its sampling parameters."""

    def __init__(self, max_sequences: int):
        # A slot is reused; its row is valid for one list of pages, and a preempted sequence returns with a new list.
        self._owner: list[list[int] | None] = [None] * max_sequences
        self._table = np.zeros((max_sequences, 16), dtype=np.int32)
        self._filled = [0] * max_sequences
        self._temperature = np.ones(max_sequences, dtype=np.float32)
        self._top_k = np.zeros(max_sequences, dtype=np.int64)
        self._top_p = np.ones(max_sequences, dtype=np.float32)
        self._min_p = np.zeros(max_sequences, dtype=np.float32)
        self._seed = np.zeros(max_sequences, dtype=np.int64)

    def prepare(self, chunks: list[Chunk]) -> StepBatch:
        """The tensors of one step, on the CPU."""
        sequences = [c.sequence for c in chunks]
        for sequence in sequences:
            self._update(sequence)
        slots = np.array([s.slot for s in sequences])
        starts = np.array([c.start for c in chunks])
        counts = np.array([c.rows for c in chunks])
        tokens = np.array([t for c in chunks for t in c.tokens], dtype=np.int64)
        final = [i for i, c in enumerate(chunks) if c.is_sampled]
        sampled = [chunks[i] for i in final]
        places = np.array([c.sequence.sampled for c in sampled], dtype=np.int64)
        states = np.array([slots, [c.read for c in chunks], [c.written for c in chunks]], dtype=np.int32)
        if (counts == 1).all() and len(sampled) == len(chunks):  # a decode step without drafts
            positions, sampled_rows, chosen = starts, np.arange(len(tokens)), slots
        else:
            ends = counts.cumsum()
            positions = np.arange(len(tokens)) + np.repeat(starts - (ends - counts), counts)
            runs = np.array([1 + len(c.draft_tokens) for c in sampled], dtype=np.int64)
            within = np.arange(runs.sum()) - np.repeat(runs.cumsum() - runs, runs)
            # A chunk without rows is sampled from the first sampled row of the last chunk with rows before it.
            firsts = (ends[final] - runs)[np.maximum.accumulate(np.where(counts[final], np.arange(len(final)), 0))]
            sampled_rows = np.repeat(firsts, runs) + within
            chosen = np.repeat(slots[final], runs)
            places = np.repeat(places, runs) + within
            computed = counts > 0
            slots, starts, counts, states = slots[computed], starts[computed], counts[computed], states[:, computed]
        draws = ops.uniforms(torch.from_numpy(self._seed[chosen]), torch.from_numpy(places))
        width = max([len(s.pages) for s in sequences])
        columns = (self._temperature, self._top_k, self._top_p, self._min_p)
        return StepBatch(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            block_table=torch.from_numpy(self._table[slots, :width]),
            query_lengths=torch.from_numpy(counts.astype(np.int32)),
            context_lengths=torch.from_numpy((starts + counts).astype(np.int32)),
            sampled=sampled,
            sampled_rows=torch.from_numpy(sampled_rows),
            sampling=(*[torch.from_numpy(c[chosen]) for c in columns], draws),
            copies=[pages for chunk in chunks for pages in chunk.copies],
            slot_copies=[(chunk.copied_slot, chunk.sequence.slot) for chunk in chunks if chunk.copies],
            states=torch.from_numpy(states),
            decodes=len(sampled_rows) == len(tokens) and len(counts) == len(chunks),
            prompt_rows=prompt_rows(chunks),
            adapted=_adapted(chunks, len(tokens)),
        )

    def _update(self, sequence: Sequence) -> None:
        """Updates the sequence's row: all of it if the sequence is new, else only new pages."""
        slot = sequence.slot
        if self._owner[slot] is not sequence.pages:
            self._owner[slot] = sequence.pages
            self._filled[slot] = 0
            params = sequence.params
            self._temperature[slot] = params.temperature
            self._top_k[slot] = params.top_k
            self._top_p[slot] = params.top_p
            self._min_p[slot] = params.min_p
            self._seed[slot] = sequence.seed
        filled = self._filled[slot]
        if filled != len(sequence.pages):
            if len(sequence.pages) > self._table.shape[1]:
                wider = max(len(sequence.pages), 2 * self._table.shape[1])
                self._table = np.pad(self._table, ((0, 0), (0, wider - self._table.shape[1])))
            self._table[slot, filled : len(sequence.pages)] = sequence.pages[filled:]
            self._filled[slot] = len(sequence.pages)


def _adapted(chunks: list[Chunk], count: int) -> list[AdaptedRows]:
    """The rows of each adapter, of `count` in all."""
    rows: dict[Adapter, list[int]] = {}
    first = 0
    for chunk in chunks:
        if chunk.sequence.adapter is not None:
            rows.setdefault(chunk.sequence.adapter.adapter, []).extend(range(first, first + chunk.rows))
        first += chunk.rows
    return [AdaptedRows(a, None if len(own) == count else torch.tensor(own)) for a, own in rows.items() if own]
