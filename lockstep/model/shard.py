"""Which part of a parameter this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's own values of `tensor`, and where in the whole they stand: all of it, unless it is a DTensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    with torch.no_grad():
        return tensor.to_local(), tuple(slice(start, start + size) for start, size in zip(offset, shape))
