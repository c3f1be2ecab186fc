"""Tensor parallelism: matrices cut over the ranks of the `tensor` axis, as `placements` declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from lockstep.model import Decoder
from lockstep.ops import FORMS
from lockstep.parallel import operators
from lockstep.parallel.placements import PLAIN_TENSORS, parameter_placement
from lockstep.parallel.world import World

FORMS[DTensor] = operators


def shard_tensor_parallel(model: Decoder, world: World) -> None:
    """Makes every parameter a DTensor on the tensor axis; on the meta device, before data parallelism shards it."""
    if world.mesh is None or world.degrees["tensor"] == 1:
        return
    distribute_parameters(model, world.mesh["tensor"], lambda on_tensor: [on_tensor])


def distribute_parameters(
    model: Decoder, mesh: DeviceMesh, placements: Callable[[Placement], Sequence[Placement]]
) -> None:
    """Replaces the model's parameters by this rank's parts: `placements` on `mesh`, from that on the tensor axis.

    What goes into `model` and comes out of it are plain tensors of this rank's tokens, equal on all ranks of the tensor
    axis, and so are their gradients: token ids, and between a pipeline's stages hidden states.
    """
    for name, parameter in list(model.named_parameters()):
        place = placements(parameter_placement(model.config.family, name))
        # Nothing is sent: the values come later, each rank's its own.
        part = distribute_tensor(parameter.detach(), mesh, place, src_data_rank=None)
        model.get_submodule(name.rpartition(".")[0]).register_parameter("weight", nn.Parameter(part))
    axes = operators.axes_of(mesh)
    outside = [PLAIN_TENSORS[axis] for axis in axes]
    inside = operators.placements("embedding", axes).result

    def enter(model: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, *others = arguments
        if first.is_floating_point():
            first = DTensor.from_local(first, mesh, outside, run_check=False).redistribute(placements=inside)
        return first, *others

    def leave(model: nn.Module, arguments: Any, hidden: DTensor) -> Tensor:
        # A copy: of a view FSDP's hooks on the output would not survive an update in place.
        return hidden.redistribute(placements=outside).to_local().clone()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)
