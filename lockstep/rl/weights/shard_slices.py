"""The slice of each tensor that a rank has or needs, and intersections of slices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.model.shard import local_part

ShardSlice = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension of the full tensor."""
Owners = dict[ShardSlice, list[int]]
"""The ranks that have each slice of a tensor."""


def shard_slice_of(tensor: Tensor) -> ShardSlice:
    """The slice of the full tensor that is this rank's part of `tensor`."""
    return tuple((along.start, along.stop) for along in local_part(tensor.detach())[1])


def read_slice(plain: Sequence[Sequence[int]]) -> ShardSlice:
    """A slice from JSON."""
    return tuple((start, stop) for start, stop in plain)


def read_slices(plain: Mapping[str, Any]) -> dict[str, ShardSlice]:
    """Slices by name from JSON."""
    return {name: read_slice(shard_slice) for name, shard_slice in plain.items()}


def owners_of(shards: Sequence[Mapping[str, ShardSlice]]) -> dict[str, Owners]:
    """The owners of each tensor. shards: by rank and name."""
    owners: dict[str, Owners] = defaultdict(lambda: defaultdict(list))
    for rank, parts in enumerate(shards):
        for name, shard_slice in parts.items():
            owners[name][shard_slice].append(rank)
    return owners


@dataclass(frozen=True)
class Piece:
    """What one rank sends to another of one tensor."""

    shard_slice: ShardSlice
    source: int
    target: int


def pieces_between(owners: Owners, targets: Sequence[ShardSlice]) -> list[Piece]:
    """What gives every rank its slice in `targets` of a tensor."""
    pieces = []
    for target, shard_slice in enumerate(targets):
        for source_slice, ranks in owners.items():
            if (overlap := intersection(source_slice, shard_slice)) is not None:
                # Among replicas, the one nearest to the target, so that every rank sends to equally many.
                source = target if target in ranks else ranks[target * len(ranks) // len(targets)]
                pieces.append(Piece(overlap, source, target))
    return pieces


def intersection(one: ShardSlice, other: ShardSlice) -> ShardSlice | None:
    """The intersection of two slices of one tensor; None if it is empty."""
    overlap = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return overlap if all(start < stop for start, stop in overlap) else None


def volume(shard_slice: ShardSlice) -> int:
    """Number of elements in a slice."""
    return math.prod(stop - start for start, stop in shard_slice)


def view_at(part: Tensor, shard_slice: ShardSlice, of: ShardSlice) -> Tensor:
    """The view of `shard_slice` in a part that covers the slice `of`."""
    return part[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(shard_slice, of))]


def first_copies(shards: Sequence[Mapping[str, ShardSlice]], names: Sequence[str]) -> list[list[int]]:
    """For each rank and tensor, the first rank with the same slice; `[ranks][names]`. shards: by rank and name."""
    per_tensor = [[of_rank[name] for of_rank in shards] for name in names]
    return [[slices.index(slices[rank]) for slices in per_tensor] for rank in range(len(shards))]


def differing(sums: Tensor, firsts: Tensor, expected: Tensor) -> Tensor:
    """For each tensor, whether its checksum differs from `expected`, or the copies of any of its parts differ.

    sums: of each rank's parts, `[ranks, names]`. firsts: from `first_copies`.
    """
    is_first = firsts == torch.arange(len(firsts), device=firsts.device)[:, None]
    return (sums != sums.gather(0, firsts)).any(0) | ((sums * is_first).sum(0) != expected)
