"""Decode steps on a CPU, repeated from tapes: a small model's step would be mostly the Python between its operators."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.generate.batch import StepBatch
from lockstep.generate.runner import Decoded, Runner, runs_own_code
from lockstep.model import Decoder
from lockstep.model.decoder import Block
from lockstep.model.lora import projections
from lockstep.ops import native

SIGHTS = 12
"""How often a number of rows comes up before it is recorded, which takes as long as a dozen steps gain."""
DRAFT_ROWS = 16
"""Rows of a step with drafts: any number up to this, and multiples of it, since other numbers seldom come up again."""
SHARED_CONTEXT = 1024
"""Longest context of drafts: a tape attends row by row, and longer ones are read once for all rows of a sequence."""


class TapedRunner(Runner):
    """Repeats decode steps of as many rows as have come up before.

    `weights` are those that are in use when a step runs. A tape holds addresses and packed weights: all are dropped
    when a weight has moved or cannot be packed where it was.
    """

    def __init__(self, model: Decoder, cache: ops.KVCache, weights: ops.PackedWeights):
        super().__init__(model, cache)
        self._weights = weights
        self._steps: dict[int, _Step] = {}
        self._settings: list[Any] = []
        self._look()
        self._arena = ops.Arena()
        self._sights: Counter[int] = Counter()
        self._most_rows = ops.FEW_ROWS

    def _look(self) -> None:
        """Modules may have been replaced, or got hooks, settings or another forward, when weights may have changed."""
        modules = list(self.model.modules())
        if (settings := [(type(m), _settings(m)) for m in modules]) != self._settings:
            self.release()
            self._settings = settings
        self._generation = self._weights.generation
        self._hooked = runs_own_code(self.model)
        self._names: list[tuple[dict[str, Any], str]] = [
            (m._parameters, name) for m in modules for name, p in m._parameters.items() if p is not None
        ]
        self._adapted = [layer for _, layer in projections(self.model) if layer.lora_A is not None]

    @staticmethod
    def can_run(model: Decoder) -> bool:
        """Whether a model's decode steps consist of kernels for the CPU, over weights that are plain parameters."""
        plain = model.halves is Block
        own = all(type(p) is nn.Parameter and not p.is_inference() for p in model.parameters())
        kernels = native.usable(model.embed_tokens.weight) and not native.is_pretending()
        return plain and own and kernels and model.runs_on is None

    def release(self) -> None:
        self._steps.clear()

    def fits(self, rows: int) -> bool:
        return rows <= DRAFT_ROWS or rows % DRAFT_ROWS == 0 or rows > self._most_rows

    def decode(self, batch: StepBatch) -> Decoded | None:
        rows = batch.tokens.shape[0]
        drafts = rows > batch.block_table.shape[0]
        self.pace = "lasting"
        if not batch.decodes or rows > self._most_rows or self.model.halves is not Block:
            return None
        if (drafts and int(batch.positions.max()) >= SHARED_CONTEXT) or torch.is_inference_mode_enabled():
            return None
        if self._generation != self._weights.generation:
            self._look()
        if self._hooked:
            return None
        held = [parameters[name] for parameters, name in self._names]
        places = [*map(id, held)], [*map(Tensor.data_ptr, held)]
        weights = places, [layer.adapted for layer in self._adapted], [*map(_version, held)]
        if (step := self._steps.get(rows)) is not None:
            if step.holds(batch, self._weights, weights):
                return step.replay(batch)
            self.release()
        if drafts and not self.fits(rows):
            return None
        self._sights[rows] += 1
        # The first soon, to know what there is to gain.
        self.pace = "slower" if self._sights[rows] < (SIGHTS if self._steps else 3) else "recording"
        if self.pace == "slower":
            return None
        try:
            step = _Step(self.model, self.cache, batch, self._weights, weights, self._arena)
        except ops.Unrecordable:
            self._most_rows = 0
            return None
        self._steps[rows] = step
        return step.decoded


def _settings(module: nn.Module) -> dict[str, Any]:
    """What a module computes with in addition to its tensors and submodules."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, bool | int | float | str | ops.Routing | None)
    }


Weights = tuple[tuple[list[int], list[int]], list[bool], list[int]]
"""Each weight's identity and address; whether each adapter is on; each weight's version counter."""
_version = operator.attrgetter("_version")


class _Step:
    """A recorded step, over static buffers."""

    def __init__(
        self,
        model: Decoder,
        cache: ops.KVCache,
        batch: StepBatch,
        packed: ops.PackedWeights,
        weights: Weights,
        arena: ops.Arena,
    ):
        rows, width = len(batch.tokens), min(cache.num_pages, -(-model.config.max_positions // ops.PAGE))
        table = batch.block_table.new_zeros(rows, width)
        temperature = batch.sampling[0].clone()
        drawing = ops.drawing(temperature, batch.sampling[-1])
        tokens, positions, contexts = batch.tokens.clone(), batch.positions.clone(), (batch.positions + 1).int()
        # What follows from the batch alone is made outside of the tape, where NumPy does it: of small tensors each of
        # PyTorch's operators takes as long as a kernel.
        attention = ops.PagedAttention(cache, table, None, contexts)
        inputs = tokens, positions, contexts, attention.slots, temperature, *drawing, table
        self._inputs = [each.numpy() for each in inputs]
        self._rows = np.arange(rows)
        self._fill(batch)

        def step() -> tuple[Tensor, ...]:
            with ops.recorded_routes() as routes:
                logits = model.logits(model(tokens, positions, attention))
            return (logits, *ops.draw_scaled(logits, *drawing), *routes)

        # Before it is recorded: another engine's thread may make larger tables at any time.
        self._positions = len(model.rotary.reserve(int(positions.max()) + 1, model.device)[0])
        self._tape = ops.Tape(step, arena)
        self._kernels = native.library()
        self._generation, self._weights = packed.generation, weights
        self.decoded = self._noted()

    def holds(self, batch: StepBatch, packed: ops.PackedWeights, weights: Weights) -> bool:
        """Whether it may be replayed for this batch. Packs weights again where they may have changed."""
        if batch.positions.numpy().max() >= self._positions or native.library() is not self._kernels:
            return False
        if (packed.generation, weights) != (self._generation, self._weights):
            if weights[:2] != self._weights[:2]:
                return False
            if any(packed.panels_of(weight) is not panels for weight, panels in self._tape.panels):
                return False
            self._generation, self._weights = packed.generation, weights
        return True

    def replay(self, batch: StepBatch) -> Decoded:
        self._fill(batch)
        self._tape.replay()
        return self._noted()

    def _noted(self) -> Decoded:
        logits, tokens, log_probs, *routes = self._tape.results
        ops.note_routes(routes)
        return Decoded(logits, tokens, log_probs)

    def _fill(self, batch: StepBatch) -> None:
        tokens, positions, contexts, slots, temperature, inverse, uniform, table = self._inputs
        asked, pages, at = batch.sampling[0].numpy(), batch.table_of_rows().numpy(), batch.positions.numpy()
        if (asked != temperature).any():
            temperature[:] = asked
            inverse[:] = ops.inverse_temperature(batch.sampling[0]).numpy()
        # As `ops.drawing` and `PagedAttention.slots` compute them.
        uniform[:] = batch.sampling[-1].numpy()
        uniform[asked == 0] = -1.0
        table[:, : pages.shape[1]] = pages
        tokens[:] = batch.tokens.numpy()
        positions[:] = at
        contexts[:] = at + 1
        page, within = np.divmod(at, ops.PAGE)
        slots[:] = pages[self._rows, page].astype(np.int64) * ops.PAGE + within
