"""Shares the trainer's memory with the generator on the same rank, for tensors that both shard alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lockstep.model import Decoder
from lockstep.model.shard import is_dtensor, local_values
from lockstep.rl.weights.shard_slices import shard_slice_of


def materialize(model: Decoder, tensors: Mapping[str, Tensor], device: torch.device) -> set[str]:
    """Gives the parameters of `model` (on the meta device) memory: that of `tensors` where they fit, else new memory.

    Returns the names of those that fit. New memory is uninitialized. tensors: the trainer's, by the model's names. One
    fits if this rank has the same shard of it, in the same dtype, on `device`: with tensor parallelism and no further
    sharding over data ranks, or with the layers of a pipeline stage.
    """
    fitting = set()
    for name, parameter in list(model.named_parameters()):
        tensor = tensors.get(name)
        if tensor is not None and fits(tensor, parameter, device):
            part = local_values(tensor.detach())
            fitting.add(name)
        else:
            part = torch.empty_like(local_values(parameter.detach()), device=device)
        if is_dtensor(parameter):
            from torch.distributed.tensor import DTensor

            mesh, placements = parameter.device_mesh, parameter.placements
            part = DTensor.from_local(
                part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_parameter(attribute, nn.Parameter(part))
    return fitting


def fits(tensor: Tensor, parameter: Tensor, device: torch.device) -> bool:
    """Whether a generator on `device` can read the trainer's `tensor` as its `parameter` on this rank."""
    part = local_values(tensor.detach())
    same_kind = part.dtype == parameter.dtype and part.device == device and part.is_contiguous()
    return same_kind and shard_slice_of(tensor) == shard_slice_of(parameter)


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both are views of the same elements; False for freed memory."""
    return (
        one.data_ptr() == other.data_ptr() != 0
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
