"""A run's memory and messages before it is paid for: one step of rank 0, on tensors without values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from lockstep import ops
from lockstep.config import CompileConfig, PretrainConfig, RLConfig
from lockstep.data import Row, divide_step
from lockstep.model import ModelConfig, ScoringModel, TrainableModel, resolve_dtype
from lockstep.model.shard import local_values
from lockstep.observe.collectives import CollectiveLog, Traffic
from lockstep.ops.native import pretending
from lockstep.parallel import Pipeline, World, close_world, parallel_model
from lockstep.parallel.data import set_gradient_sums
from lockstep.parallel.pipeline_stage import Computed
from lockstep.parallel.world import imagined_world
from lockstep.train.context import shard_row
from lockstep.train.packing import PackedRow, pack_rows
from lockstep.train.trainer import Trainer


@dataclass
class DryRun:
    """What was found. Memory is in bytes, of one rank."""

    world: World
    parameters: int
    """Of the whole model."""
    memory: dict[str, int]
    """By what it is for; together, the peak of a step."""
    traffic: dict[tuple[str, str], Traffic]
    """Messages of some micro-batches and the update, by (axis, kind)."""
    passed: int
    """So many micro-batches: two, or the only one of a step, or as many as are under way in a pipeline."""
    microbatches: int
    """Of a step, on each rank."""
    dtype: str
    """Of the weights in the forward pass."""

    def text(self) -> str:
        """Tables for a terminal."""
        of_axes = {**self.world.degrees, "expert": self.world.expert}
        degrees = ", ".join(f"{axis} {degree}" for axis, degree in of_axes.items() if degree > 1)
        lines = [
            f"{self.world.size} ranks ({degrees or 'alone'})",
            f"{self.parameters / 1e9:.3f} B parameters in {self.dtype}",
            f"{self.microbatches} micro-batches per rank and step",
            "",
            "memory of a rank, GiB",
            *(f"  {name:28}{size / 2**30:10.3f}" for name, size in self.memory.items()),
            f"  {'together':28}{sum(self.memory.values()) / 2**30:10.3f}",
            "",
            f"messages of rank 0 in {self.passed} micro-batches and the update" if self.traffic else "no messages",
        ]
        for (axis, kind), held in sorted(self.traffic.items()):
            lines.append(f"  {axis:16}{kind:28}{held.calls:6} calls{held.bytes / 2**20:12.1f} MiB")
        return "\n".join(lines)


def dry_run(
    config: PretrainConfig, shape: ModelConfig, ranks: int, loss: Callable[[ScoringModel, PackedRow], Tensor]
) -> DryRun:
    """Builds rank 0 of `ranks` for a model of this shape, and takes it through a micro-batch and an update.

    Raises UserError where the degrees do not fit the ranks, or the step the pipeline. Activations are those of the
    operators' fused forms; what torch.compile saves on top is not counted. Collectives are a device's: CPUs
    reduce-scatter by an all-to-all.
    """
    world = imagined_world(config.parallel, ranks)
    try:
        length, tokens = config.sequence_length, config.train.tokens_per_microbatch
        of_step, rows = divide_step(
            length, config.tokens_per_step, tokens, world.data_size, config.train.deterministic_layout
        )
        share = of_step // (world.data_size * rows)
        row = pack_rows([_row(length)] * rows)
        _, found = imagined_step(config, shape, world, imagined_tensors(), row, share, loss)
    finally:
        close_world(world)
    return found


def imagined_tensors() -> FakeTensorMode:
    """In which tensors have no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def imagined_step(
    config: PretrainConfig | RLConfig,
    shape: ModelConfig,
    world: World,
    fake: FakeTensorMode,
    row: PackedRow,
    share: int,
    loss: Callable[[ScoringModel, PackedRow], Tensor],
    beside: Mapping[str, nn.Parameter] | None = None,
) -> tuple[Trainer, DryRun]:
    """A step of `world`'s rank 0, of `share` micro-batches like `row`; the trainer's tensors are those of `fake`.

    beside: as for `Trainer`. Raises UserError where the degrees do not fit the model, or the step the pipeline.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

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
        trainer = Trainer(model, config.train, config.steps, world, beside)
        for name in ("tokens", "positions", "predictors", "targets", "counts"):
            setattr(row, name, fake.from_tensor(getattr(row, name)))
        tracker = FSDPMemTracker(model) if isinstance(model, FSDPModule) else MemTracker()
        tracker.track_external(model)
        leave_out_frozen(tracker, model)
        with CollectiveLog(world.group_names) as log:
            with tracker, whole_shapes_uncounted():
                passed = _pass(trainer, row, loss, min(share, 2), log, tracker)
            trainer.optimizer.update(config.train.learning_rate, 0.0)
        memory = _memory(trainer, share, tracker)
    return trainer, DryRun(world, shape.num_parameters, memory, dict(log.traffic), passed, share, config.dtype)


def leave_out_frozen(tracker: Any, model: TrainableModel) -> None:
    """torch's tracker puts hooks on the gradient of every parameter, and frozen ones refuse them."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        tracker._param_to_grad_hook_handles[parameter] = (_NoHook(), _NoHook())


class _NoHook:
    def remove(self) -> None:
        pass


def on_meta(world: World) -> World:
    """Where a model is laid out that has no values: meshes are made of real numbers, so before values are left out."""
    return replace(world, device=torch.device("meta")) if world.mesh is not None else world


@contextmanager
def whole_shapes_uncounted() -> Iterator[None]:
    """DTensor finds a result's whole shape on fake tensors of its own, which beside ours would count as memory."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    found = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(self: ShardingPropagator, schema: Any) -> Any:
        with _disable_current_modes():
            return found(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = uncounted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = found  # type: ignore[method-assign]


def leave(model: TrainableModel) -> None:
    """Fills no weights."""


def _pass(
    trainer: Trainer,
    row: PackedRow,
    loss: Callable[[ScoringModel, PackedRow], Tensor],
    count: int,
    log: CollectiveLog,
    tracker: Any,
) -> int:
    """Forward and backward of `count` micro-batches, or of as many as are under way in a pipeline; returns how many.

    From the second on, gradients of those before are kept beside a micro-batch's activations.
    """
    model = trainer.model
    if not isinstance(model, Pipeline):
        for index in range(count):
            if isinstance(model, FSDPModule):
                last = trainer.config.deterministic_layout or index == count - 1
                set_gradient_sums(model, trainer.sums_every_microbatch, last)
            tracker.reset_mod_stats()
            assert isinstance(model, ScoringModel)
            loss(model, row).backward()
            trainer.optimizer.gradients.end_microbatch()
        return count
    count = model.world.degrees["pipeline"]
    ends: list[Tensor] = []
    for _ in range(count):
        tracker.reset_mod_stats()
        for stage in model.stages:
            hidden = torch.empty(len(row.tokens), model.config.dim, dtype=model.compute_dtype, requires_grad=True)
            out = stage(row.tokens if stage.is_first else hidden, row.positions, row.attention)
            ends.append(loss(Computed(stage, out), row) if stage.is_last else out.sum())
            messages = log.traffic["pipeline", "send, receive"]
            messages.calls += 2 * (not stage.is_first) + 2 * (not stage.is_last)
            messages.bytes += hidden.nbytes * (2 * (not stage.is_first) + 2 * (not stage.is_last))
    for index, end in enumerate(ends):
        for stage in model.stages:
            if isinstance(stage, FSDPModule):
                # As torch's schedules do: gradients are summed, and weights let go, after the last of all.
                set_gradient_sums(stage, False, last=index == len(ends) - 1)
                stage.set_reshard_after_backward(index == len(ends) - 1)
        end.backward()
    return count


def _memory(trainer: Trainer, microbatches: int, tracker: Any) -> dict[str, int]:
    optimizer = trainer.optimizer
    weights, masters = _bytes(trainer.model.parameters()), _bytes(optimizer.masters.values())
    state = _bytes(optimizer.state_tensors().values())
    apart = any(m is not p for m, p in zip(optimizer.masters.values(), optimizer.parameters.values()))
    gradients = 0 if trainer.config.optimizer_in_backward else masters
    sharded = any(isinstance(module, FSDPModule) for module in trainer.model.modules())
    if sharded and microbatches > 1 and not trainer.sums_every_microbatch:
        # Of the sharded weights every rank holds the whole gradient until the step's last micro-batch.
        gradients = sum(4 * _gathered(p) for p in optimizer.parameters.values())
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    at_peak = {getattr(kind, "value", kind): size for kind, size in peak.items()}
    # Beside a micro-batch's own, one for each size of subtree.
    subtrees = masters * (microbatches.bit_length() - 1) if trainer.config.deterministic_layout else 0
    return {
        "weights": weights,
        **({"float32 masters": masters} if apart else {}),
        "gradients": gradients,
        **({"sums of micro-batches": subtrees} if subtrees else {}),
        "optimizer state": state - masters,
        # Activations, gathered weights and buffers.
        "a micro-batch at its peak": max(0, at_peak["Total"] - weights - gradients),
    }


def _gathered(parameter: Tensor) -> int:
    """Elements of what FSDP gathers of a parameter: all of it, or its part on the axis of tensor or of experts."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    axes = parameter.device_mesh.mesh_dim_names or ()
    cut = [
        axis
        for axis, place in zip(axes, parameter.placements)
        if axis in ("tensor", "experts") and not place.is_replicate()
    ]
    return parameter.numel() // math.prod(parameter.device_mesh[axis].size() for axis in cut)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_values(t).nbytes for t in tensors)


def _row(length: int) -> Row:
    return Row(np.zeros(length, dtype=np.int64), [length], np.arange(length) > 0, padding=0)
