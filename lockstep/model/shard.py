"""This rank's shard of a parameter.

Importing DTensor and FSDP takes most of a second. A process with shards has imported them; a single rank never does.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, without importing DTensor."""
    return _is(value, "torch.distributed.tensor", "DTensor")


def is_fsdp(value: object) -> TypeGuard[FSDPModule]:
    """Whether it is a module that FSDP shards, without importing FSDP."""
    return _is(value, "torch.distributed.fsdp", "FSDPModule")


def _is(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def local_values(tensor: Tensor) -> Tensor:
    """This rank's values of `tensor`: all of them, unless it is a DTensor."""
    with torch.no_grad():
        return tensor.to_local() if is_dtensor(tensor) else tensor


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's values of `tensor`, and their place in the whole: all of it, unless it is a DTensor."""
    if not is_dtensor(tensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    with unset_fake_temporarily():  # slices need real numbers, also in a dry run
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local_values(tensor), tuple(slice(start, start + size) for start, size in zip(offset, shape))
