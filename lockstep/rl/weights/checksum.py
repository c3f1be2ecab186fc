"""A checksum of a tensor that equals the sum of its parts' checksums, however the tensor is sharded."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.ops import native
from lockstep.rl.weights.shard_slices import ShardSlice

WORD = 8
"""Bytes multiplied at once, if rows are split at multiples of this."""
ROWS_BYTES = 1 << 20
"""Bytes processed together, so that they stay in the processor's cache."""

CACHED = 64
"""Locations whose factors are cached for the next transfer: layers share them."""


def checksum(part: Tensor, shard_slice: ShardSlice, shape: Sequence[int]) -> Tensor:
    """Σ bits · (odd number of the position), modulo 2^64, over the elements of `part`, as a scalar int64 tensor.

    shard_slice: of `part` in a tensor of `shape`, whose checksum is the sum of its parts'. The factors depend on row
    and column, so swapped elements are detected, and a single flipped bit always is: it changes the sum by a power of
    two times an odd number.
    """
    if len(shape) < 2:
        part, shard_slice, shape = part.reshape(-1, 1), (*shard_slice, (0, 1))[-2:], (*shape, 1)[-2:]
    bounds, (start, stop), words = shard_slice[:-1], shard_slice[-1], WORD // part.element_size()
    bits = part.detach().reshape(-1, part.shape[-1]).contiguous()
    if shape[-1] % words == 0 and start % words == 0 and stop % words == 0:
        bits, start, stop = bits.view(torch.int64), start // words, stop // words
    else:
        bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()])
    if native.usable(part) and not native.is_pretending():
        return torch.tensor(_native(bits, _rows(bounds, tuple(shape)), start))
    return _plain(bits, _row_factors(bounds, tuple(shape), part.device), _column_factors(start, stop, part.device))


def _native(bits: Tensor, rows: Tensor, first_column: int) -> int:
    function = native.function("checksum" + {2: "_i16", 4: "_i32", 8: "_i64"}[bits.element_size()])
    function.argtypes, function.restype = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3, ctypes.c_int64
    total: int = function(bits.data_ptr(), rows.data_ptr(), *bits.shape, first_column)
    return total


def _plain(bits: Tensor, row_factors: Tensor, column_factors: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    step = max(1, ROWS_BYTES // max(1, WORD * bits.shape[1]))
    for first in range(0, len(bits), step):
        sums = (bits[first : first + step].long() * column_factors).sum(1)
        total += (sums * row_factors[first : first + step]).sum()
    return total


@lru_cache(maxsize=CACHED)
def _rows(bounds: ShardSlice, shape: tuple[int, ...]) -> Tensor:
    """The index in the full tensor of each row of a part, with all dimensions but the last flattened."""
    numbers = torch.zeros(1, dtype=torch.int64)
    for size, (start, stop) in zip(shape[:-1], bounds):
        numbers = (numbers[:, None] * size + torch.arange(start, stop)).reshape(-1)
    return numbers


@lru_cache(maxsize=CACHED)
def _row_factors(bounds: ShardSlice, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return _odd_numbers(~_rows(bounds, shape).to(device))


@lru_cache(maxsize=CACHED)
def _column_factors(start: int, stop: int, device: torch.device) -> Tensor:
    return _odd_numbers(torch.arange(start, stop, device=device))


def _odd_numbers(numbers: Tensor) -> Tensor:
    """A well-mixed odd number for each (the finalizer of SplitMix64, Steele, Lea and Flood, 2014)."""
    mixed = numbers * -7046029254386353131  # 0x9E3779B97F4A7C15
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) | 1
