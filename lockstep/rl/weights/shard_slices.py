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

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension of a tensor."""
LINE = 64
"""Alignment, in bytes, of parts laid out one after another."""


@dataclass(frozen=True)
class Held:
    """Part of a tensor that one rank has or wants."""

    box: Box
    shape: tuple[int, ...]


def held_part(tensor: Tensor) -> Held:
    """What this rank holds of `tensor`."""
    return Held(box_of(tensor), tuple(tensor.shape))


def box_of(tensor: Tensor) -> Box:
    """Where this rank's part of `tensor` is in the full tensor."""
    return tuple((own.start, own.stop) for own in local_part(tensor.detach())[1])


def plain_parts(parts: Mapping[str, Held]) -> dict[str, Any]:
    """JSON-able; `read_parts` reads it back."""
    return {name: [list(part.box), list(part.shape)] for name, part in parts.items()}


def read_parts(parts: Mapping[str, Any]) -> dict[str, Held]:
    return {name: Held(read_box(box), tuple(shape)) for name, (box, shape) in parts.items()}


def read_box(box: Sequence[Sequence[int]]) -> Box:
    return tuple((start, stop) for start, stop in box)


def holders_of(held: Sequence[Mapping[str, Held]]) -> dict[str, dict[Box, list[int]]]:
    """The ranks that hold each part of each tensor."""
    holders: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, parts in enumerate(held):
        for name, part in parts.items():
            holders[name][part.box].append(rank)
    return holders


def common(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return shared if all(start < stop for start, stop in shared) else None


def volume(box: Box) -> int:
    """Number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def at(part: Tensor, box: Box, of: Box) -> Tensor:
    """The view of `box` in a part that covers the box `of`."""
    return part[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, of))]


def offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of parts of these sizes (bytes) laid out one after another, and their total size."""
    found, end = {}, 0
    for name, size in sizes.items():
        found[name], end = end, end + -(-size // LINE) * LINE
    return found, end


def checksum_of(part: Tensor, held: Held) -> Tensor:
    """The `checksum` of a part at the place that `held` gives."""
    return checksum(part, tuple(slice(*bounds) for bounds in held.box), torch.Size(held.shape))


def first_copies(wanted: Sequence[Mapping[str, Held]], names: Sequence[str]) -> list[list[int]]:
    """For each rank and tensor, the first rank that wants the same part; `[ranks][names]`."""
    firsts = [[0] * len(names) for _ in wanted]
    for index, name in enumerate(names):
        boxes = [of_rank[name].box for of_rank in wanted]
        for rank, box in enumerate(boxes):
            firsts[rank][index] = boxes.index(box)
    return firsts


def differing(sums: Tensor, firsts: Tensor, expected: Tensor) -> Tensor:
    """For each tensor, whether its parts `[ranks, names]` do not add up to `expected`, or copies of a part differ."""
    is_first = firsts == torch.arange(len(firsts), device=firsts.device)[:, None]
    return (sums != sums.gather(0, firsts)).any(0) | ((sums * is_first).sum(0) != expected)
