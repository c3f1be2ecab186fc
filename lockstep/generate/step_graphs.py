"""Step graphs: decode steps on a CPU, recorded and replayed without the Python between operators.

That Python takes most of the time of a small model's step.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.generate.batch import StepBatch
from lockstep.generate.runner import Decoded, Runner, has_custom_forward
from lockstep.model import Decoder
from lockstep.model.adapted_rows import adapted
from lockstep.model.adapters import Adapter
from lockstep.model.decoder import Block
from lockstep.model.layers import adaptable
from lockstep.ops import native

STEPS_BEFORE_RECORDING = 12
"""Steps with a number of rows before it is recorded: recording takes as long as a dozen replays save."""
MOST_RECORDED = 256
"""Recorded steps in memory: adapters of any of the rows make as many different ones as there are divisions of rows."""
DRAFT_ROWS = 16
"""Steps with drafts have a power of two of rows up to this, or a multiple of it: other numbers seldom occur again."""
SHARED_CONTEXT = 1024
"""The longest context with drafts: a step graph attends row by row, while a direct step reads the keys of a long
context once for all rows of a sequence."""


class StepGraphRunner(Runner):
    """Replays decode steps whose number of rows, and the adapter of each, have been recorded.

    `weights` are in use when a step runs. A step graph contains addresses and packed weights: all graphs are dropped
    when a weight has moved or cannot be packed into the same memory.
    """

    def __init__(
        self,
        model: Decoder,
        cache: ops.KVCache,
        weights: ops.PackedWeights,
        delta_cache: ops.DeltaCache | None = None,
    ):
        super().__init__(model, cache, delta_cache)
        self._weights = weights
        self.steps_before_recording = STEPS_BEFORE_RECORDING
        self._steps: dict[Kind, _Step] = {}
        self._settings: list[Any] = []
        self._inspect()
        self._arena = ops.Arena()
        self._times_seen: Counter[Kind] = Counter()
        self._most_rows = ops.FEW_ROWS

    def _inspect(self) -> None:
        """Reads the model anew: a change of weights may include new modules, hooks, settings or forwards."""
        modules = list(self.model.modules())
        if (settings := [(type(m), _settings(m)) for m in modules]) != self._settings:
            self.release()
            self._settings = settings
        self._generation = self._weights.generation
        self._hooked = has_custom_forward(self.model)
        self._names: list[tuple[dict[str, Any], str]] = [
            (m._parameters, name) for m in modules for name, p in m._parameters.items() if p is not None
        ]
        self._adapted = [layer for _, layer in adaptable(self.model) if layer.lora_A is not None]

    @staticmethod
    def can_run(model: Decoder) -> bool:
        """Whether a model's decode steps consist of CPU kernels on plain parameters."""
        plain = model.halves is Block
        kinds = (nn.Parameter, ops.PackedWeight)
        parameters = all(type(p) in kinds and not p.is_inference() for p in model.parameters())
        kernels = native.usable(model.norm.weight) and not native.is_pretending()
        return plain and parameters and kernels and model.runs_on is None

    @property
    def recorded(self) -> list[int]:
        """The numbers of rows whose steps are replayed."""
        return [rows for rows, _ in self._steps]

    def release(self) -> None:
        self._steps.clear()

    def adapter_gone(self, adapter: Adapter) -> None:
        for known in (self._steps, self._times_seen):
            for kind in [kind for kind in known if any(adapter is each for each, _ in kind[1])]:
                del known[kind]

    def fits(self, rows: int) -> bool:
        if self.delta_cache is not None:
            return True
        power = rows <= DRAFT_ROWS and rows & (rows - 1) == 0
        return power or rows % DRAFT_ROWS == 0 or rows > self._most_rows

    def decode(self, batch: StepBatch) -> Decoded | None:
        rows = batch.tokens.shape[0]
        drafts = rows > batch.block_table.shape[0]
        if not batch.decodes or rows > self._most_rows or self.model.halves is not Block:
            return None
        if self.has_delta_drafts(batch):
            return None
        if (drafts and int(batch.positions.max()) >= SHARED_CONTEXT) or torch.is_inference_mode_enabled():
            return None
        if self._generation != self._weights.generation:
            self._inspect()
        if self._hooked:
            return None
        current = [parameters[name] for parameters, name in self._names]
        places = [*map(id, current)], [*map(Tensor.data_ptr, current)]
        weights = places, [layer.adapted for layer in self._adapted], [*map(_version, current)]
        kind = rows, tuple((each, None if own is None else tuple(own.tolist())) for each, own in batch.adapted)
        if (step := self._steps.get(kind)) is not None:
            if step.is_valid(batch, self._weights, weights):
                return step.replay(batch)
            if kind[1]:
                del self._steps[kind]  # perhaps only its adapters' panels have moved
            else:
                self.release()
        if drafts and not self.fits(rows):
            return None
        if len(self._times_seen) > 4 * MOST_RECORDED:
            self._times_seen.clear()
        self._times_seen[kind] += 1
        if self._times_seen[kind] < self.steps_before_recording:
            return None
        if len(self._steps) >= MOST_RECORDED:
            del self._steps[next(iter(self._steps))]
        try:
            step = _Step(self, batch, self._weights, weights, self._arena)
        except ops.Unrecordable:
            self._most_rows = 0
            return None
        self._steps[kind] = step
        return step.decoded


def _settings(module: nn.Module) -> dict[str, Any]:
    """A module's settings: what it computes with besides tensors and submodules."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, bool | int | float | str | ops.Routing | None)
    }


Kind = tuple[int, tuple[tuple[Adapter, tuple[int, ...] | None], ...]]
"""The number of a step's rows, and the rows of each adapter; None: all."""
Weights = tuple[tuple[list[int], list[int]], list[bool], list[int]]
"""Each weight's identity and address; whether each adapter is on; each weight's version counter."""
_version = operator.attrgetter("_version")


class _Step:
    """A recorded step, over static buffers."""

    def __init__(self, runner: Runner, batch: StepBatch, packed: ops.PackedWeights, weights: Weights, arena: ops.Arena):
        model, cache = runner.model, runner.cache
        rows, width = len(batch.tokens), min(cache.num_pages, -(-model.config.max_positions // ops.PAGE))
        table = batch.block_table.new_zeros(rows, width)
        temperature = batch.sampling[0].clone()
        drawing = ops.drawing(temperature, batch.sampling[-1])
        tokens, positions, contexts = batch.tokens.clone(), batch.positions.clone(), (batch.positions + 1).int()
        # Inputs that follow from the batch alone are computed outside of the graph, with NumPy: on small tensors, each
        # of PyTorch's operators takes as long as a kernel.
        states = batch.states.new_zeros(3, rows)
        attention = ops.PagedAttention(cache, table, None, contexts, runner.delta_step(states))
        inputs = tokens, positions, contexts, attention.slots, temperature, *drawing, table, states
        self._has_states = runner.delta_cache is not None
        self._inputs = [each.numpy() for each in inputs]
        self._rows = np.arange(rows)
        self._fill(batch)

        def step() -> tuple[Tensor, ...]:
            with ops.recorded_routes() as routes, adapted(batch.adapted):
                logits = model.logits(model(tokens, positions, attention))
            return (logits, *ops.draw_scaled(logits, *drawing), *routes)

        # Before recording: another engine's thread may replace the tables by larger ones at any time.
        self._positions = len(model.rotary.reserve(int(positions.max()) + 1, model.device)[0][0])
        self._graph = ops.StepGraph(step, arena)
        self._kernels = native.library()
        self._generation, self._weights = packed.generation, weights
        self.decoded = self._results()

    def is_valid(self, batch: StepBatch, packed: ops.PackedWeights, weights: Weights) -> bool:
        """Whether it can be replayed for this batch. Packs weights again if they may have changed."""
        if batch.positions.numpy().max() >= self._positions or native.library() is not self._kernels:
            return False
        if (packed.generation, weights) != (self._generation, self._weights):
            if weights[:2] != self._weights[:2]:
                return False
            if any(packed.panels_of(weight, layout) is not panels for weight, layout, panels in self._graph.panels):
                return False
            self._generation, self._weights = packed.generation, weights
        return True

    def replay(self, batch: StepBatch) -> Decoded:
        self._fill(batch)
        self._graph.replay()
        return self._results()

    def _results(self) -> Decoded:
        logits, tokens, log_probs, *routes = self._graph.results
        ops.note_routes(routes)
        return Decoded(logits, tokens, log_probs)

    def _fill(self, batch: StepBatch) -> None:
        tokens, positions, contexts, slots, temperature, inverse, uniform, table, states = self._inputs
        requested, pages, at = batch.sampling[0].numpy(), batch.table_of_rows().numpy(), batch.positions.numpy()
        if (requested != temperature).any():
            temperature[:] = requested
            inverse[:] = ops.inverse_temperature(batch.sampling[0]).numpy()
        # As `ops.drawing` and `PagedAttention.slots` compute them.
        uniform[:] = batch.sampling[-1].numpy()
        uniform[requested == 0] = -1.0
        table[:, : pages.shape[1]] = pages
        if self._has_states:
            states[:] = batch.states.numpy()
        tokens[:] = batch.tokens.numpy()
        positions[:] = at
        contexts[:] = at + 1
        page, within = np.divmod(at, ops.PAGE)
        slots[:] = pages[self._rows, page].astype(np.int64) * ops.PAGE + within
