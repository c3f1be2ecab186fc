"""Which part of a parameter this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor


def local_values(tensor: Tensor) -> Tensor:
    """This rank's own values of `tensor`: all of it, unless it is a DTensor."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's own values of `tensor`, and where in the whole they stand: all of it, unless it is a DTensor."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    with unset_fake_temporarily():  # places are numbers, in a dry run too
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local_values(tensor), tuple(slice(start, start + size) for start, size in zip(offset, shape))
