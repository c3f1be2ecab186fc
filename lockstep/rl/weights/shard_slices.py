"""Which part of each tensor a rank holds or wants, as a box of the full tensor, and intersections of such boxes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.model.shard import local_part
from lockstep.rl.weights.checksum import checksum

ShardSlice = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension of a tensor."""
LINE = 64
"""Alignment, in bytes, of parts laid out one after another."""


@dataclass(frozen=True)
class LocalShard:
    """Part of a tensor that one rank has or wants."""

    shard_slice: ShardSlice
    shape: tuple[int, ...]


def local_shard_of(tensor: Tensor) -> LocalShard:
    """What this rank holds of `tensor`."""
    return LocalShard(shard_slice_of(tensor), tuple(tensor.shape))


def shard_slice_of(tensor: Tensor) -> ShardSlice:
    """Where this rank's part of `tensor` is in the full tensor."""
    return tuple((own.start, own.stop) for own in local_part(tensor.detach())[1])


def plain_parts(parts: Mapping[str, LocalShard]) -> dict[str, Any]:
    """JSON-able; `read_parts` reads it back."""
    return {name: [list(part.shard_slice), list(part.shape)] for name, part in parts.items()}


def read_parts(parts: Mapping[str, Any]) -> dict[str, LocalShard]:
    return {
        name: LocalShard(read_shard_slice(shard_slice), tuple(shape)) for name, (shard_slice, shape) in parts.items()
    }


def read_shard_slice(shard_slice: Sequence[Sequence[int]]) -> ShardSlice:
    return tuple((start, stop) for start, stop in shard_slice)


def holders_of(held: Sequence[Mapping[str, LocalShard]]) -> dict[str, dict[ShardSlice, list[int]]]:
    """The ranks that hold each part of each tensor."""
    holders: dict[str, dict[ShardSlice, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, parts in enumerate(held):
        for name, part in parts.items():
            holders[name][part.shard_slice].append(rank)
    return holders


def common(one: ShardSlice, other: ShardSlice) -> ShardSlice | None:
    """The intersection of two boxes; None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return shared if all(start < stop for start, stop in shared) else None


def volume(shard_slice: ShardSlice) -> int:
    """Number of elements in a box."""
    return math.prod(stop - start for start, stop in shard_slice)


def at(part: Tensor, shard_slice: ShardSlice, of: ShardSlice) -> Tensor:
    """The view of `shard_slice` in a part that covers the box `of`."""
    return part[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(shard_slice, of))]


def offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of parts of these sizes (bytes) laid out one after another, and their total size."""
    found, end = {}, 0
    for name, size in sizes.items():
        found[name], end = end, end + -(-size // LINE) * LINE
    return found, end


def checksum_of(part: Tensor, held: LocalShard) -> Tensor:
    """The `checksum` of a part at the place that `held` gives."""
    return checksum(part, tuple(slice(*bounds) for bounds in held.shard_slice), torch.Size(held.shape))


def first_copies(wanted: Sequence[Mapping[str, LocalShard]], names: Sequence[str]) -> list[list[int]]:
    """For each rank and tensor, the first rank that wants the same part; `[ranks][names]`."""
    firsts = [[0] * len(names) for _ in wanted]
    for index, name in enumerate(names):
        shard_slices = [of_rank[name].shard_slice for of_rank in wanted]
        for rank, shard_slice in enumerate(shard_slices):
            firsts[rank][index] = shard_slices.index(shard_slice)
    return firsts


def differing(sums: Tensor, firsts: Tensor, expected: Tensor) -> Tensor:
    """For each tensor, whether its parts `[ranks, names]` do not add up to `expected`, or copies of a part differ."""
    is_first = firsts == torch.arange(len(firsts), device=firsts.device)[:, None]
    return (sums != sums.gather(0, firsts)).any(0) | ((sums * is_first).sum(0) != expected)
