"""One step's tensors, prepared from arrays that persist between steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import ops
from lockstep.generate.sampling_params import SamplingParams
from lockstep.generate.scheduler import Chunk
from lockstep.generate.sequence import Sequence


@dataclass
class StepBatch:
    """The inputs of the model and the sampler."""

    tokens: Tensor
    positions: Tensor
    block_table: Tensor
    query_lengths: Tensor
    context_lengths: Tensor
    sampled: list[Chunk]
    """The chunks whose sequences are sampled in this step: after their last token, and after each guess."""
    sampled_rows: Tensor
    """The rows that are sampled, chunk after chunk."""
    sampling: tuple[Tensor, ...]
    """Temperature, top_k, top_p, min_p and uniform draw of each of these rows."""

    @property
    def decodes(self) -> bool:
        """Whether every row is sampled."""
        return len(self.sampled_rows) == len(self.tokens)

    @property
    def params(self) -> list[SamplingParams]:
        """The sampling parameters of each sampled row."""
        return [chunk.sequence.params for chunk in self.sampled for _ in range(1 + len(chunk.guess))]

    def row_by_row(self) -> tuple[Tensor, Tensor]:
        """Pages and context length of each row, as if it were a separate sequence with one query."""
        contexts = (self.positions + 1).int()
        if len(self.block_table) == len(self.tokens):
            return self.block_table, contexts
        return self.block_table.repeat_interleave(self.query_lengths.long(), 0), contexts

    def to(self, device: torch.device) -> StepBatch:
        """This batch on another device."""
        tensors: Any = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **tensors, sampling=tuple(t.to(device) for t in self.sampling))


class BatchArrays:
    """One row per running sequence: its pages and its sampling parameters."""

    def __init__(self, max_sequences: int):
        # A row is owned by a list of pages: a preempted sequence comes back with a new list.
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
        for chunk in chunks:
            self._update(chunk.sequence)
        slots = np.array([c.sequence.slot for c in chunks])
        starts = np.array([c.start for c in chunks])
        counts = np.array([c.rows for c in chunks])
        ends = counts.cumsum()
        total = int(ends[-1])
        tokens = np.array([t for c in chunks for t in c.tokens], dtype=np.int64)
        positions = np.arange(total) + np.repeat(starts - (ends - counts), counts)
        final = [i for i, c in enumerate(chunks) if c.is_sampled]
        sampled = [chunks[i] for i in final]
        runs = np.array([1 + len(c.guess) for c in sampled], dtype=np.int64)
        within = np.arange(runs.sum()) - np.repeat(runs.cumsum() - runs, runs)
        sampled_rows = np.repeat(ends[final] - runs, runs) + within
        chosen = np.repeat(slots[final], runs)
        places = np.repeat(np.array([c.sequence.sampled for c in sampled], dtype=np.int64), runs) + within
        draws = ops.uniforms(torch.from_numpy(self._seed[chosen]), torch.from_numpy(places))
        width = max(len(c.sequence.pages) for c in chunks)
        columns = (self._temperature, self._top_k, self._top_p, self._min_p)
        return StepBatch(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            block_table=torch.from_numpy(self._table[slots, :width]),
            query_lengths=torch.from_numpy(counts.astype(np.int32)),
            context_lengths=torch.from_numpy((starts + counts).astype(np.int32)),
            sampled=sampled,
            sampled_rows=torch.from_numpy(sampled_rows),
            sampling=(*(torch.from_numpy(c[chosen]) for c in columns), draws),
        )

    def _update(self, sequence: Sequence) -> None:
        """Updates the sequence's row: all of it if the sequence is new, else only its new pages."""
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
