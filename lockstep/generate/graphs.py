"""CUDA graphs of a decode step: the model's launches are recorded once per batch size and replayed over static buffers.

A replay reads the trainer's own weights, so the next step sees an update in place; once they are at other addresses,
steps are recorded again. Weights in integers are packed before a replay, into the memory that it reads. A batch is
padded to the next captured size; the padding rows belong to no sequence, so they write no page and their results are
dropped.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep import ops
from lockstep.config import EngineConfig
from lockstep.config.engine import Graphs
from lockstep.errors import UserError
from lockstep.generate.batch import StepBatch
from lockstep.generate.runner import Decoded, Runner, has_custom_forward
from lockstep.model import Decoder
from lockstep.model.layers import adaptable, projections
from lockstep.ops.cuda.graph import Capture, CudaCapture, Replay, Tensors
from lockstep.parallel.tensor_group import tensor_group_of

DRAFT_ROWS = 64
"""Rows of the largest captured decode step when drafts fill the rows that few sequences leave free."""


def graphs_of(config: EngineConfig, model: Decoder) -> Graphs:
    """Resolves `config.cuda_graphs` for this model: `auto` captures steps if all of their operators can be captured."""
    if config.cuda_graphs != "auto":
        return config.cuda_graphs
    sharded = tensor_group_of(model) is not None or model.runs_on is not None
    return "full" if model.device.type == "cuda" and model.config.latent is None and not sharded else "none"


def ladder(largest: int) -> list[int]:
    """The numbers of rows that are captured: powers of two, and the largest."""
    return sorted({1 << i for i in range(largest.bit_length())} | {largest})


class Inputs(NamedTuple):
    """Static buffers of a step, of the ladder's largest size: views of one allocation, filled by one copy."""

    tokens: Tensor
    positions: Tensor
    uniform: Tensor
    contexts: Tensor
    temperature: Tensor

    @classmethod
    def within(cls, memory: Tensor) -> Inputs:
        """memory: 4 bytes `[8, rows]`, rows even."""
        wide = (memory[2 * i : 2 * i + 2].flatten() for i in range(3))
        tokens, positions, uniform = (part.view(t) for part, t in zip(wide, (torch.int64, torch.int64, torch.float64)))
        return cls(tokens, positions, uniform, memory[6], memory[7].view(torch.float32))


class GraphRunner(Runner):
    """Replays decode steps. `capture` replaces CUDA's in tests. Raises UserError for a step that cannot be captured.

    `weights` are in use when a step runs.
    """

    def __init__(
        self,
        model: Decoder,
        cache: ops.KVCache,
        config: EngineConfig,
        weights: ops.PackedWeights,
        capture: Capture | None = None,
        delta_cache: ops.DeltaCache | None = None,
    ):
        super().__init__(model, cache, delta_cache)
        if capture is None and model.device.type != "cuda":
            raise UserError(
                f'engine: cuda_graphs is "{config.cuda_graphs}", but the model is on {model.device.type}; '
                'set it to "none", or move the model to a GPU'
            )
        self.sizes = ladder(config.max_sequences if config.draft == "none" else max(config.max_sequences, DRAFT_ROWS))
        self._capture: Capture = capture or CudaCapture()
        self._whole: dict[int, Replay] = {}
        self._adapters: list[Any] = []
        self._read: list[Any] = []
        self._adapted: list[bool] = []
        self._weights, self._generation = weights, weights.generation
        self._moved, self._hooked = True, False
        largest, device = self.sizes[-1], model.device
        width = min(cache.num_pages, -(-model.config.max_positions // ops.PAGE))
        even = largest + largest % 2
        self._staging = torch.zeros(8, even, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._memory = torch.zeros(8, even, dtype=torch.int32, device=device)
        self._inputs = Inputs.within(self._memory)
        self._table = torch.zeros(largest, width, dtype=torch.int32, device=device)
        self._states = torch.zeros(3, largest, dtype=torch.int32, device=device)
        # Graphs keep reading the tables they were captured with, which the model may replace by larger ones.
        self._tables = model.rotary.reserve(width * ops.PAGE, device)

    def decode(self, batch: StepBatch) -> Decoded | None:
        """The whole step in one replay, if all of its rows are sampled."""
        count = len(batch.tokens)
        if not batch.decodes or batch.adapted or count > self.sizes[-1] or self.has_delta_drafts(batch):
            return None
        self._drop_if_moved()
        if self._hooked:
            return None
        size = self._size(count)
        table = batch.table_of_rows()
        # A context of 0 marks a row as padding.
        self._staging.zero_()
        values = Inputs(batch.tokens, batch.positions, batch.sampling[-1], batch.positions + 1, batch.sampling[0])
        for staging, column in zip(Inputs.within(self._staging), values):
            staging[:count] = column
        self._memory.copy_(self._staging, non_blocking=True)
        self._table[:count, : table.shape[1]].copy_(table, non_blocking=True)
        if self.delta_cache is not None:
            self._states[:, :count].copy_(batch.states, non_blocking=True)
        if size not in self._whole:
            self._whole[size] = self._captured(partial(self._step, size), f"a decode step of {size} rows")
        logits, tokens, log_probs = self._whole[size]()
        return Decoded(logits[:count], tokens[:count], log_probs[:count])

    @property
    def most_rows(self) -> int:
        return self.sizes[-1]

    def padded(self, rows: int) -> int:
        return self._size(rows) if rows <= self.sizes[-1] else rows

    def release(self) -> None:
        self._whole.clear()
        if isinstance(self._capture, CudaCapture):
            self._capture = CudaCapture()  # a pool cannot be reused once its graphs are freed

    def weights_changed(self) -> None:
        self._moved = True

    def _drop_if_moved(self) -> None:
        """Drops graphs of weights that have moved, or of adapters that have been switched on or off. Packs integers of
        weights that may have changed."""
        if self._moved:
            self._hooked = has_custom_forward(self.model)
            self._adapters = [layer for _, layer in adaptable(self.model) if layer.lora_A is not None]
        adapted = [layer.adapted for layer in self._adapters]
        if not self._moved and (adapted, self._weights.generation) == (self._adapted, self._generation):
            return
        read: list[Any] = [(p.data_ptr(), p.dtype, p.shape, p.stride()) for p in self.model.parameters()]
        read += [self._packed(layer.weight, layer.precision) for _, layer in projections(self.model)]
        read.append(self._packed(self.model.head_weight, self.model.head_format))
        if (read, adapted) != (self._read, self._adapted):
            self.release()
        self._read, self._adapted, self._moved = read, adapted, False
        self._generation = self._weights.generation

    def _packed(self, weight: Tensor, precision: str) -> int | None:
        """The address of a weight's integers; None if each step packs them, or computes without."""
        layout = ops.FORMATS[precision].layout
        if layout is None or not layout.on_gpu(weight):
            return None
        panels = self._weights.panels_of(weight, layout)
        return None if panels is None else panels.data_ptr()

    def _size(self, rows: int) -> int:
        return self.sizes[bisect.bisect_left(self.sizes, rows)]

    def _step(self, size: int) -> Tensors:
        """From the embedding to the draw, over the first `size` rows of the static buffers."""
        tokens, positions, uniform, contexts, temperature = (buffer[:size] for buffer in self._inputs)
        delta = self.delta_step(self._states[:, :size])
        attention = ops.PagedAttention(self.cache, self._table[:size], None, contexts, delta)
        hidden = self.model(tokens, positions, attention)
        logits = self.model.logits(hidden)
        return (logits, *ops.draw(logits, temperature, uniform))

    def _captured(self, function: Callable[[], Tensors], region: str) -> Replay:
        """`function`, captured; a replay records the routes that its mixtures choose."""
        count = 0

        def with_routes() -> Tensors:
            nonlocal count
            with ops.recorded_routes() as routes:
                results = function()
            count = len(results)
            return (*results, *routes)

        def replay() -> Tensors:
            results = captured()
            ops.note_routes(results[count:])
            return results[:count]

        try:
            captured = self._capture(with_routes)
        except RuntimeError as error:
            raise UserError(
                f'engine: cuda_graphs is "full", but {region} cannot be captured ({error}); an operator in it '
                'synchronizes with the device or allocates outside torch. Set engine.cuda_graphs to "none"'
            ) from error
        return replay
