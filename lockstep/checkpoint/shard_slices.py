"""Shard slices of tensors, and the bytes that they occupy in a file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.errors import UserError


def open_safetensors(path: Path) -> Any:
    """Opens a file without reading its tensors. Raises UserError, naming the file."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error}); delete this checkpoint") from error


def slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    """The index of a shard slice in its tensor."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))


def bytes_of(tensor: Tensor) -> memoryview:
    """A CPU tensor's values in row-major order, as stored in a file."""
    values: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def contiguous_ranges(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> Iterator[tuple[int, int]]:
    """The bytes of a shard slice in a row-major tensor: first byte and length of each contiguous range."""
    strides = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
    # The last axis that the slice cuts; along it and all later axes the slice is contiguous.
    cut = max((axis for axis in range(len(shape)) if sizes[axis] != shape[axis]), default=0)
    length = math.prod(sizes[cut:]) * dtype.itemsize
    outer = [range(offset, offset + size) for offset, size in zip(offsets[:cut], sizes[:cut])]
    inner = offsets[cut] * strides[cut] if len(shape) else 0
    for index in itertools.product(*outer):
        yield sum(i * stride for i, stride in zip(index, strides)) + inner, length
