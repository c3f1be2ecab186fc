"""Estimates a run's memory and communication from one step of rank 0 on tensors without values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from lockstep import ops
from lockstep.checkpoint import folder_if_model
from lockstep.config import CompileConfig, LoraConfig, PretrainConfig, RLConfig, validate
from lockstep.data import Row, divide_step
from lockstep.hub import is_local, named_path
from lockstep.model import (
    Decoder,
    ModelConfig,
    ScoringModel,
    TrainableModel,
    choose_dtype,
    is_auto,
    preset,
    read_config,
    refuse_score_head,
    resolve_dtype,
)
from lockstep.model.shard import local_values
from lockstep.observe.collectives import CollectiveLog, Traffic
from lockstep.ops.native import pretending
from lockstep.parallel import Pipeline, World, close_world, parallel_model
from lockstep.parallel.exchange import divided_rows, is_no_subtree
from lockstep.parallel.world import simulated_world
from lockstep.train.context import shard_row
from lockstep.train.dry_run_pipeline import PipelineStep, simulated_ranks
from lockstep.train.live_memory import LiveMemory
from lockstep.train.objective import NextTokenLoss
from lockstep.train.packing import PackedRow, pack_rows
from lockstep.train.refusals import refuse_long_rows, refuse_shape
from lockstep.train.resolve_defaults import recorded_settings
from lockstep.train.setup import adapted, packs_frozen, with_precision
from lockstep.train.trainer import Trainer

Run = TypeVar("Run", PretrainConfig, RLConfig)
StageMemory = dict[str, dict[str, int]]
"""Bytes by purpose, for each stage of a step in which they are allocated."""
TRAINING = "training"


@dataclass
class DryRun:
    """What training needs. Memory is in bytes, for one rank."""

    world: World
    parameters: int
    """Number of parameters of the whole model."""
    memory: dict[str, int]
    """By purpose; the sum is the peak of a step."""
    traffic: dict[tuple[str, str], Traffic]
    """Messages of some micro-batches and the update, by (axis, kind)."""
    passed: int
    """The number of these micro-batches: two, or the only one of a step; in a pipeline all, or three per stage."""
    microbatches: int
    """Micro-batches per step on each rank."""
    dtype: str
    """The dtype of the weights in the forward pass."""

    def heading(self, note: str = "") -> list[str]:
        """The first lines of a text. note: on the number of micro-batches."""
        of_axes = {**self.world.degrees, "expert": self.world.expert}
        degrees = ", ".join(f"{axis} {degree}" for axis, degree in of_axes.items() if degree > 1)
        return [
            f"{self.world.size} ranks ({degrees or 'no parallelism'})",
            f"{self.parameters / 1e9:.3f} B parameters in {self.dtype}",
            f"{self.microbatches} micro-batches per rank and step{note}",
            "",
        ]

    def text(self) -> str:
        """Tables for a terminal."""
        in_pipeline = self.world.degrees["pipeline"] > 1
        place = f"rank {self.world.coordinate('pipeline')} of the pipeline, which needs the most"
        of_stage = {name: {TRAINING: size} for name, size in self.memory.items()}
        lines = [
            *self.heading(),
            *table(f"memory of {place if in_pipeline else 'a rank'}, GiB", of_stage, [TRAINING]),
            "",
            "no messages",
        ]
        if self.traffic:
            whose = "that rank" if in_pipeline else "rank 0"
            lines[-1] = f"messages of {whose} in {self.passed} micro-batches and the update"
        for (axis, kind), sent in sorted(self.traffic.items()):
            lines.append(f"  {axis:16}{kind:28}{sent.calls:6} calls{sent.bytes / 2**20:12.1f} MiB")
        return "\n".join(lines)


def peaks_of(memory: StageMemory, stages: Sequence[str]) -> dict[str, int]:
    """Total bytes in each of the stages."""
    return {stage: sum(sizes.get(stage, 0) for sizes in memory.values()) for stage in stages}


def table(title: str, memory: StageMemory, stages: Sequence[str]) -> list[str]:
    """Memory by purpose and stage, with sums, for a terminal."""

    def cells(sizes: Mapping[str, int]) -> str:
        return "".join(f"{sizes[stage] / 2**30:12.3f}" if stage in sizes else " " * 12 for stage in stages)

    return [
        f"{title:36}" + "".join(f"{stage:>12}" for stage in stages),
        *(f"  {name:34}{cells(sizes)}" for name, sizes in memory.items()),
        f"  {'together':34}{cells(peaks_of(memory, stages))}",
    ]


def estimate_memory(config: PretrainConfig) -> DryRun:
    """A dry run of one of `config.dry_run` ranks; no data is read, so a preset has its family's vocabulary.

    Raises UserError for bad input.
    """
    config, shape, why, _ = resolve_simulated(config)
    refuse_long_rows(config, shape)
    result = dry_run(config, shape, config.dry_run, NextTokenLoss(config.train.tokens_per_microbatch))
    return replace(result, dtype=result.dtype + why)


def resolve_simulated(config: Run) -> tuple[Run, ModelConfig, str, bool]:
    """(config with its model's folder and a dtype, the model's shape, why this dtype, whether ranks are CPUs).

    Raises UserError for bad input.
    """
    validate(config)
    config = replace(config, model=folder_if_model(config.model))
    shape = shape_of(config.model, config.lora)
    refuse_score_head(shape, config.model)
    # The ranks are assumed to be elsewhere, on GPUs, unless the config says CPU.
    on_cpu = config.device == "cpu" or (config.dry_run == 1 and not config.device and not torch.cuda.is_available())
    dtype, why = recorded_settings(config).get("dtype", ""), "as the run began"
    if not is_auto(config.dtype) or not dtype:
        dtype, why = choose_dtype(config.dtype, config.model, torch.device("cpu" if on_cpu else "cuda"))
    return replace(config, dtype=dtype), shape, f" (auto: {why})" if why else "", on_cpu  # type: ignore[arg-type]


def shape_of(model: str, lora: LoraConfig | None = None) -> ModelConfig:
    """The shape of a folder or a preset, with a fresh adapter if `lora` has a rank."""
    model = folder_if_model(model)
    shape = read_config(named_path(model)) if is_local(model) else preset(model)
    return adapted(shape, lora, model) if lora and lora.rank else shape


def dry_run(
    config: PretrainConfig, shape: ModelConfig, ranks: int, loss: Callable[[ScoringModel, PackedRow], Tensor]
) -> DryRun:
    """Builds one of `ranks` ranks for a model of this shape, and runs a micro-batch and an update on it.

    In a pipeline, it is the rank that needs the most, with as many micro-batches as its schedule has in flight.

    Raises UserError if the degrees do not fit the number of ranks, or the step does not fit the pipeline. Activations
    are those of the fused operators; further savings by torch.compile are not counted. Collectives are those of a GPU;
    CPUs reduce-scatter with an all-to-all.
    """
    world = simulated_world(config.parallel, ranks)
    try:
        length, tokens = config.sequence_length, config.train.tokens_per_microbatch
        of_step, rows = divide_step(
            length, config.tokens_per_step, tokens, world.data_size, config.train.deterministic_layout
        )
        share = of_step // (world.data_size * rows)
        results = [
            simulated_step(config, shape, rank, simulated_tensors(), pack_rows([_row(length)] * rows), share, loss)[1]
            for rank in simulated_ranks(world, config.parallel)
        ]
    finally:
        close_world(world)
    return max(results, key=lambda result: sum(result.memory.values()))


def simulated_tensors() -> FakeTensorMode:
    """A mode in which tensors have no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def simulated_step(
    config: PretrainConfig | RLConfig,
    shape: ModelConfig,
    world: World,
    fake: FakeTensorMode,
    row: PackedRow,
    share: int,
    loss: Callable[[ScoringModel, PackedRow], Tensor],
    extra_parameters: Mapping[str, nn.Parameter] | None = None,
) -> tuple[Trainer, DryRun]:
    """Runs a step of `share` micro-batches like `row` on `world`'s rank; the trainer's tensors are those of `fake`.

    extra_parameters: as for `Trainer`. Raises UserError as `refuse_shape` and `parallel_model` do, or if the pipeline
    cannot run so many micro-batches.
    """
    shape = with_precision(shape, config)
    refuse_shape(config, shape, world)
    row = shard_row(row, world)
    row.attention = row.attention or ops.PackedAttention(row.lengths)
    with nullcontext() if world.mesh is not None else fake:
        compute, laid_out = resolve_dtype(config.dtype), on_meta(world)
        model = parallel_model(shape, compute, laid_out, config.parallel, CompileConfig(), leave, config.recompute)
    if isinstance(model, Pipeline):
        model.plan.check_microbatches(share)
    with fake, pretending():
        if world.mesh is not None:
            for part in model.stages if isinstance(model, Pipeline) else (model,):
                part.to_empty(device="cpu")
        trainer = Trainer(model, config.train, config.steps, world, extra_parameters)
        optimizer = trainer.optimizer
        for name in ("tokens", "positions", "predictors", "targets", "counts"):
            setattr(row, name, fake.from_tensor(getattr(row, name)))
        existing = [local_values(tensor) for tensor in [*model.parameters(), *optimizer.state_tensors().values()]]
        with (
            CollectiveLog(world.group_names) as log,
            LiveMemory(existing) as live,
            whole_shapes_uncounted(),
            divided_rows(),
        ):
            passed = _pass(trainer, row, loss, share, log)
            optimizer.update(config.train.learning_rate, 0.0)
        memory = _memory(trainer, share, live.peak)
        if packs_frozen(config, world):
            assert isinstance(model, Decoder)  # of one process
            memory["weights"] -= _saved_by_packing(model)
    return trainer, DryRun(world, shape.num_parameters, memory, dict(log.traffic), passed, share, config.dtype)


def on_meta(world: World) -> World:
    """A world to lay out a model on the meta device, outside the fake mode, since meshes need real numbers."""
    return replace(world, device=torch.device("meta")) if world.mesh is not None else world


@contextmanager
def whole_shapes_uncounted() -> Iterator[None]:
    """Excludes the fake tensors from which DTensor infers a result's full shape, which would be counted as memory."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    counted = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(self: ShardingPropagator, schema: Any) -> Any:
        with _disable_current_modes():
            return counted(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = uncounted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = counted  # type: ignore[method-assign]


def leave(model: TrainableModel) -> None:
    """Leaves weights unfilled."""


def _pass(
    trainer: Trainer,
    row: PackedRow,
    loss: Callable[[ScoringModel, PackedRow], Tensor],
    share: int,
    log: CollectiveLog,
) -> int:
    """Forward and backward of as many of a step's `share` micro-batches as show its peak; returns how many.

    From the second on, the gradients of the previous ones take memory besides a micro-batch's activations.
    """
    model = trainer.model
    count = min(share, 2)
    if not isinstance(model, Pipeline):
        for index in range(count):
            if isinstance(model, FSDPModule):
                last = trainer.config.deterministic_layout or index == count - 1
                model.set_requires_gradient_sync(trainer.sums_every_microbatch or last)
                model.set_requires_all_reduce(last)
            assert isinstance(model, ScoringModel)
            loss(model, row).backward()
            trainer.optimizer.gradients.end_microbatch()
        return count
    # No more than these are in flight at a time, unless all are.
    count = share if model.plan.keeps_all else min(share, 3 * model.plan.stages)
    PipelineStep(model, row, count, share, loss, log).run()
    return count


def _memory(trainer: Trainer, microbatches: int, peak: int) -> dict[str, int]:
    optimizer = trainer.optimizer
    weights, masters = bytes_of(trainer.model.parameters()), bytes_of(optimizer.masters.values())
    state = bytes_of(optimizer.state_tensors().values())
    separate = any(m is not p for m, p in zip(optimizer.masters.values(), optimizer.parameters.values()))
    gradients = 0 if trainer.config.optimizer_in_backward else masters
    sharded = any(isinstance(module, FSDPModule) for module in trainer.model.modules())
    if sharded and microbatches > 1 and not trainer.sums_every_microbatch:
        # Every rank has the full gradient of the sharded weights until the step's last micro-batch.
        gradients = sum(4 * _gathered(p) for p in optimizer.parameters.values())
    existing = weights + (state if separate else state - masters)
    subtrees = _subtrees(masters, microbatches, trainer.world) if trainer.config.deterministic_layout else 0
    return {
        "weights": weights,
        **({"float32 masters": masters} if separate else {}),
        "gradients": gradients,
        **({"sums of micro-batches": subtrees} if subtrees else {}),
        "optimizer state": state - masters,
        # Activations, gathered weights, buffers, and temporaries of an update.
        "a micro-batch at its peak": max(0, peak - existing - gradients),
    }


def _saved_by_packing(model: Decoder) -> int:
    """Bytes by which the integers of frozen weights are smaller, as `Decoder.pack_frozen` has them."""
    weights = [(each.weight, ops.FORMATS[each.format].layout) for each in model.formatted_weights().values()]
    return sum(w.nbytes - 4 * layout.words(w) for w, layout in weights if layout and not w.requires_grad)


def _subtrees(nbytes: int, microbatches: int, world: World) -> int:
    """Bytes of a step's sums in addition to those of one micro-batch: one for each size of subtree."""
    shards, replicas = world.degrees["data_shard"], world.degrees["data_replicate"]
    if is_no_subtree(replicas):  # each rank adds up the leaves of a part (`exchange.SumOverReplicas`)
        return nbytes * ((microbatches * replicas).bit_length() - 1) // replicas
    return nbytes * ((microbatches * (shards if is_no_subtree(shards) else 1)).bit_length() - 1)


def _gathered(parameter: Tensor) -> int:
    """Elements of a parameter that FSDP gathers: all of it, or its part on the tensor or expert axis."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    axes = parameter.device_mesh.mesh_dim_names or ()
    split = [
        axis
        for axis, place in zip(axes, parameter.placements)
        if axis in ("tensor", "experts") and not place.is_replicate()
    ]
    return parameter.numel() // math.prod(parameter.device_mesh[axis].size() for axis in split)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's parts."""
    return sum(local_values(t).nbytes for t in tensors)


def _row(length: int) -> Row:
    return Row(np.zeros(length, dtype=np.int64), [length], np.arange(length) > 0, padding=0)
