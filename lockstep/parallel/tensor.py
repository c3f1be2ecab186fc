"""Weights as DTensors, as `placements` declares: over the `tensor` axis, over the experts' ranks, or over all axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from lockstep.model import Decoder
from lockstep.model.decoder import Block, Projected
from lockstep.ops import FORMS
from lockstep.parallel import operators
from lockstep.parallel.exchange import exchanged, gather_rows, local_rows, rows_are_whole
from lockstep.parallel.placements import COLUMNS, COPY, ROWS, WEIGHTS_ON_DATA, parameter_placement
from lockstep.parallel.tensor_group import axes_of
from lockstep.parallel.world import World

FORMS[DTensor] = operators

FULL_DTENSOR_AXES = ("data_replicate", "data_shard", "context", "tensor")


def shard_tensor_parallel(model: Decoder, world: World) -> None:
    """Makes every parameter a DTensor on the tensor axis; on the meta device, before data parallelism."""
    if world.mesh is None or world.degrees["tensor"] == 1:
        return
    distribute_parameters(model, world.mesh["tensor"], lambda on_tensor: [on_tensor])


def shard_experts(model: Decoder, world: World) -> None:
    """Makes experts DTensors on the ranks that share them, if these are more than the tensor axis's."""
    if world.expert_mesh is None:
        return
    for module in experts_of(model):
        for name, parameter in list(module.named_parameters()):
            part = distribute_tensor(parameter.detach(), world.expert_mesh["experts"], [ROWS], src_data_rank=None)
            owner, _, kind = name.rpartition(".")
            module.get_submodule(owner).register_parameter(kind, nn.Parameter(part))


def distribute_everything(model: Decoder, world: World) -> None:
    """Makes every parameter of `model`, on the meta device, a DTensor on the mesh of all axes with several ranks.

    This is data, context and tensor parallelism by placements alone (`parallel.full_dtensor`). Weights are sharded over
    all axes. Operators redistribute them to be unsharded on the axes whose ranks see different tokens: an all-gather,
    whose backward is a reduce-scatter of the gradients. FSDP does the same with hooks.
    """
    assert world.mesh is not None
    axes = [axis for axis in FULL_DTENSOR_AXES if world.degrees[axis] > 1]

    def placements(on_tensor: Placement) -> list[Placement]:
        everywhere = {"data_replicate": COPY, "tensor": on_tensor}
        return [everywhere.get(axis, WEIGHTS_ON_DATA[on_tensor]) for axis in axes]

    distribute_parameters(model, world.mesh[tuple(axes)], placements)


def experts_of(model: Decoder) -> list[nn.Module]:
    """The modules whose parameters are experts."""
    return [module for name, module in model.named_modules() if name.endswith(".mlp.experts")]


def distribute_parameters(
    model: Decoder, mesh: DeviceMesh, placements: Callable[[Placement], Sequence[Placement]]
) -> None:
    """Replaces the model's parameters by this rank's parts; `placements` maps the tensor placement to those on `mesh`.

    The inputs and outputs of `model`, token ids and hidden states, are equal on all ranks of the tensor axis. So are
    the gradients between a pipeline's stages; after the last norm, each rank has a part of their sum.
    """
    axes = axes_of(mesh)
    ranks = mesh.size(axes.index("tensor")) if "tensor" in axes else 1
    for name, parameter in list(model.named_parameters()):
        if isinstance(parameter, DTensor):
            continue  # an expert, which is on a separate mesh
        place = placements(parameter_placement(model.config, name, ranks))
        if parameter.ndim == 1:  # its one dimension may already be sharded by the tensor axis
            place = [COPY if each == COLUMNS else each for each in place]
        # Nothing is sent: values are filled in later.
        part = distribute_tensor(parameter.detach(), mesh, place, src_data_rank=None)
        owner, _, kind = name.rpartition(".")
        model.get_submodule(owner).register_parameter(kind, nn.Parameter(part, parameter.requires_grad))
    if "tensor" not in axes:
        return
    group = mesh.get_group("tensor")
    if ranks > model.config.num_kv_heads:
        model.halves = OneKeyValueHead(group, model.config.num_kv_heads)

    def enter(model: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, *others = arguments
        if first.is_floating_point() and not rows_are_whole():
            first = exchanged(first, group, local_rows, gather_rows)
        return first, *others

    def leave(model: nn.Module, arguments: Any, hidden: Tensor) -> Tensor:
        # The last norm has already gathered the rows.
        if hasattr(model, "norm") or rows_are_whole():
            return hidden
        return exchanged(hidden, group, gather_rows, local_rows)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)


class OneKeyValueHead:
    """The halves of a block whose `heads` key-value heads are fewer than the ranks of `group`: every rank has the
    weights of all of them, and attends with one."""

    def __init__(self, group: dist.ProcessGroup, heads: int):
        head = group.rank() * heads // group.size()
        self.local = slice(head, head + 1)

    def before_attention(self, block: Block, hidden: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        if block.is_delta:
            return block.before_attention(hidden, cos, sin)
        q, k, v, gate = block.before_attention(hidden, cos, sin)
        return q, self._own(k), self._own(v), gate

    def _own(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, self.local].contiguous()

    def after_attention(self, block: Block, hidden: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        return block.after_attention(hidden, attended, gate)
