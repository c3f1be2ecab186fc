"""A few training steps under any layout, to be compared with those of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.config import CompileConfig, ParallelConfig, RecomputeConfig, TrainConfig
from lockstep.model import Decoder, ModelConfig, initialize, preset, resolve_dtype
from lockstep.model.shard import local_part
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.train import PackedRow, Trainer, pack, target_log_probs
from lockstep.train.context import shard_row
from lockstep.train.objective import NextTokenLoss
from lockstep.train.packing import split_by_tokens

LENGTHS = (40, 24, 33, 17, 40, 24, 33, 17)


@dataclass
class Trace:
    """What a run computed: compared as bits where a layout cuts no sum, and within a tolerance where it does."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    log_probs: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of this rank's share of the first step's tokens, before any update."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """At the end, whole."""
    moved: dict[str, Tensor] = field(default_factory=dict)
    """How far training has moved each float32 master, whole."""


def train(
    parallel: ParallelConfig,
    dtype: str = "float32",
    steps: int = 20,
    model: str | ModelConfig = "qwen3:micro",
    vocab: int = 258,
    tied: bool | None = True,
    settings: dict[str, Any] | None = None,
    recompute: RecomputeConfig | None = None,
    compiled: bool = False,
    layers: int = 4,
    lengths: Sequence[int] = LENGTHS,
    tokens: int = 64,
) -> Trace:
    """Trains a fresh model on one batch, again and again; the same in every layout. `settings` go to TrainConfig;
    tokens: of a micro-batch."""
    world = open_world(parallel, "cpu")
    shape = preset(model, vocab) if isinstance(model, str) else model
    tied = shape.tie_embeddings if tied is None else tied
    shape = dataclasses.replace(shape, tie_embeddings=tied, num_layers=layers)
    compiling = CompileConfig(backend="inductor" if compiled else "none")
    decoder = parallel_model(shape, resolve_dtype(dtype), world, parallel, compiling, drawn, recompute)
    fixed: dict[str, Any] = dict(learning_rate=1e-3, warmup_steps=0, schedule="constant")
    trainer = Trainer(decoder, TrainConfig(**(fixed | (settings or {}))), steps, world)
    # An optimizer in the backward goes with one micro-batch.
    tokens = 1024 if trainer.config.optimizer_in_backward else tokens
    draw = torch.Generator().manual_seed(0)
    trace = Trace()
    began = {name: whole(master.detach()) for name, master in trainer.optimizer.masters.items()}
    # What is repeated is learnt: each step's loss depends on all the updates before it.
    sequences = [torch.randint(vocab, (n,), generator=draw).tolist() for n in lengths]
    for step in range(steps):
        parts = _parts(lengths, world.data_size, tokens)[world.data_rank]
        if trainer.config.deterministic_layout:  # micro-batches are those of one process, dealt in turn
            parts = _parts(lengths, 1, tokens)[0][world.data_rank :: world.data_size]
        rows = [shard_row(pack(sequences[part]), world) for part in parts]
        if step == 0:
            trace.log_probs = _log_probs(trainer, rows)
        metrics = trainer.step(rows, NextTokenLoss(sum(lengths) - len(lengths)))
        trace.losses.append(metrics["loss"])
        trace.norms.append(metrics["grad_norm"])
    trace.weights = {name: whole(p.detach()) for name, p in decoder.named_parameters()}
    trace.moved = {n: whole(m.detach()) - began[n] for n, m in trainer.optimizer.masters.items()}
    close_world(world)
    return trace


def drawn(model: Any, seed: int = 3) -> None:
    """Fresh weights, with biases and sinks that are not zero: of a sharded one this rank's part."""
    initialize(model, seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("_proj.bias", "sinks", "_proj_bias", "router.bias")):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
            local, place = local_part(parameter)
            with torch.no_grad():
                local.copy_(values[place])


def _parts(lengths: Sequence[int], ranks: int, tokens: int) -> list[list[slice]]:
    """Each rank's micro-batches of about `tokens`: consecutive slices of the sequences, equally many a rank."""
    if ranks == 1:
        return [split_by_tokens(lengths, tokens)]
    ends = np.cumsum(lengths)
    count = -(-int(ends[-1]) // (tokens * ranks))
    cuts = np.searchsorted(ends, np.linspace(0, int(ends[-1]), count * ranks + 1)[1:-1], side="right")
    slices = [slice(start, stop) for start, stop in pairwise([0, *(int(c) for c in cuts), len(lengths)])]
    assert all(part.stop > part.start for part in slices)
    return [slices[rank * count : (rank + 1) * count] for rank in range(ranks)]


def _log_probs(trainer: Trainer, rows: list[PackedRow]) -> Tensor:
    found: list[Tensor] = [torch.empty(0)]

    def keep(model: Decoder, row: PackedRow) -> Tensor:
        found.append(target_log_probs(model, row)[0])
        return found[-1].sum()

    trainer.evaluate(rows, keep)
    return torch.cat(found)


def whole(tensor: Tensor) -> Tensor:
    """All ranks' parts of it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def assert_same_bits(traces: list[Trace], expected: Trace) -> None:
    """Every rank has the losses, norms, masters and weights of one process, and together they have all weights."""
    together: set[str] = set()
    for trace in traces:
        assert trace.losses == expected.losses and trace.norms == expected.norms
        for name, way in trace.moved.items():
            assert torch.equal(way, expected.moved[name]), name
        for name, weight in trace.weights.items():
            # Over ranks the float32 shards are the masters, and gathered in the model's dtype.
            assert torch.equal(weight.to(expected.weights[name].dtype), expected.weights[name]), name
        together |= trace.weights.keys()
    assert together == expected.weights.keys()


def assert_log_probs(traces: list[Trace], expected: Trace, tensor: int = 1) -> None:
    """Sorted, for a context group's ranks have tokens from everywhere; those of a tensor group all have the same."""
    found = torch.cat([trace.log_probs for trace in traces]).sort().values
    assert torch.equal(found[::tensor], expected.log_probs.sort().values)
