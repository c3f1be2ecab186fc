"""The ranks that share a weight, from its mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.model import Decoder
from lockstep.model.shard import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def axes_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes. Raises ValueError if they have none: rules are looked up by name."""
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no names for its axes")
    return tuple(mesh.mesh_dim_names)


def tensor_group(weight: DTensor) -> dist.ProcessGroup | None:
    """The ranks that share the tensor axis; None if the weight's mesh has none."""
    mesh, axes = weight.device_mesh, axes_of(weight.device_mesh)
    return mesh.get_group(axes.index("tensor")) if "tensor" in axes else None


def tensor_group_of(model: Decoder) -> dist.ProcessGroup | None:
    """The ranks that share the model's matrices; None if it is not sharded."""
    weight = next(model.parameters())  # all of them, or all of a stage's, are on one mesh
    return tensor_group(weight) if is_dtensor(weight) else None


def sharded_over_data(model: Decoder) -> bool:
    """Whether weights are sharded over more than the tensor axis, on ranks that see different tokens."""
    weight = next(model.parameters())
    return is_dtensor(weight) and axes_of(weight.device_mesh) != ("tensor",)
