"""Gradient norms, in total and by part of the model, however the gradients are distributed over ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import ops
from lockstep.model.shard import is_dtensor
from lockstep.parallel.messages import from_all

PARTS = ("embedding", "attention", "feed-forward", "norms", "head", "value_head", "other")


@torch.no_grad()
def gradient_norms(
    grads: Mapping[str, Tensor], further_groups: Sequence[dist.ProcessGroup] = (), shared: Collection[str] = ()
) -> dict[str, float]:
    """Euclidean norms by metric name, the same on every rank: `grad_norm`, and `grad_norm/<part>` for each part.

    A DTensor's shards are summed over the mesh axes that it is sharded on; its copies count once. Everything is summed
    over `further_groups`, whose ranks have different parameters (the stages of a pipeline), except the `shared` ones.
    Raises ValueError for gradients with pending sums: their norm is not that of their parts.
    """
    if any(dist.get_rank(group) for group in further_groups):
        grads = {name: grad for name, grad in grads.items() if name not in shared}
    return norms_of_squares(local_squares(grads), grads, further_groups)


@torch.no_grad()
def exact_norms(grads: Mapping[str, Tensor], further_groups: Sequence[dist.ProcessGroup] = ()) -> dict[str, float]:
    """`gradient_norms` with the same bits for any sharding of the gradients: their squares are added as integers.

    The squares of a gradient are rounded to multiples of a power of two, which is chosen from its largest element on
    all ranks and the number of elements so that no sum overflows 63 bits: with 10⁸ elements, the largest square is 2³³
    multiples or more. A gradient that is not finite has an infinite norm. Every rank passes the same gradients, except
    over `further_groups`, whose ranks may share some.
    """
    local = {name: g.to_local() if is_dtensor(g) else g for name, g in grads.items()}
    maxima = [part.abs().amax() if part.numel() else part.new_zeros(()) for part in local.values()]
    largest = _over_shards(grads, [part.double() for part in maxima], dist.ReduceOp.MAX)
    exponents = {
        name: min(ops.EXACT_BITS, 62 - grads[name].numel().bit_length()) - 2 * math.frexp(most)[1]
        for name, most in largest.items()
        if math.isfinite(most)
    }
    finite = {name: grads[name] for name in exponents}
    sums = _over_shards(finite, [ops.integer_squares(local[name], exponents[name]) for name in finite])
    # As integers and powers of two, which are sent between ranks exactly; None for a gradient that is not finite.
    squares = {name: (sums[name], exponents[name]) if name in sums else None for name in grads}
    for group in further_groups:
        squares = {name: square for of_rank in from_all(squares, group) for name, square in of_rank.items()}
    norms = {"grad_norm": _norm_of(squares.values())}
    for part in PARTS:
        if (norm := _norm_of(square for name, square in squares.items() if part_of(name) == part)) > 0:
            norms[f"grad_norm/{part}"] = norm
    return norms


def _over_shards(
    placed: Mapping[str, Tensor], values: Sequence[Tensor], operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dict[str, Any]:
    """One number per name, from those of this rank's shards; a maximum is infinite if one is not finite."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = defaultdict(list)
    for index, tensor in enumerate(placed.values()):
        by_groups[_groups(tensor)].append(index)
    names = list(placed)
    totals: dict[str, Any] = {}
    for groups, members in by_groups.items():
        local = torch.stack([values[index] for index in members]).cpu()
        if operation == dist.ReduceOp.MAX:
            local = torch.where(local.isfinite(), local, torch.inf)  # a maximum over ranks may ignore NaN
        for group in groups:
            dist.all_reduce(local, op=operation, group=group)
        totals |= dict(zip((names[index] for index in members), local.tolist()))
    return totals


def _norm_of(squares: Iterable[Sequence[int] | None]) -> float:
    total = Fraction(0)
    for square in squares:
        if square is None:
            return math.inf
        total += Fraction(square[0]) / Fraction(2) ** square[1]
    return math.sqrt(total)


def local_squares(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum of squares of each gradient's part on this rank, float64."""
    if not grads:
        return {}
    parts = [g.to_local() if is_dtensor(g) else g for g in grads.values()]
    if parts[0].device.type == "cpu":
        return {name: ops.sum_of_squares(part) for name, part in zip(grads, parts)}
    return dict(zip(grads, squares_by_device(parts)))


def squares_by_device(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The sum of squares of each tensor, float64, in an order that the device chooses.

    Accumulated in float64, as on a CPU: a float32 sum of 10⁷ squares is off by a percent, and a shard's differs.
    """
    return torch.stack(list(torch._foreach_norm(list(parts), dtype=torch.float64))).square().unbind()


def norms_of_squares(
    squares: Mapping[str, Tensor], placed: Mapping[str, Tensor], further_groups: Sequence[dist.ProcessGroup] = ()
) -> dict[str, float]:
    """`gradient_norms` from this rank's squares; `placed` has tensors that are distributed as the gradients are."""
    names: dict[tuple[dist.ProcessGroup, ...], list[str]] = defaultdict(list)
    for name in squares:
        names[_groups(placed[name])].append(name)
    sums = torch.zeros(len(PARTS), dtype=torch.float64)
    for groups, members in names.items():
        total = torch.stack([squares[name] for name in members])
        for group in groups:
            dist.all_reduce(total, group=group)
        parts = [*map(part_of, members)]
        places = [[i for i, each in enumerate(parts) if each == part] for part in PARTS]
        # Added part by part: a scattered addition has no fixed order on a GPU.
        sums = sums.to(total.device) + torch.stack([ops.total(total[place]) for place in places])
    sums = sums.cpu()  # as are the zeros of a stage without gradients, whose layers are frozen
    for group in further_groups:
        dist.all_reduce(sums, group=group)
    squared = sums.tolist()
    norms = [math.sqrt(square) for square in (sum(squared), *squared)]
    by_part = {f"grad_norm/{part}": norm for part, norm in zip(PARTS, norms[1:]) if norm > 0 or norm != norm}
    return {"grad_norm": norms[0], **by_part}


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, one of `PARTS`."""
    if "norm" in name:
        return "norms"
    kinds = {"embed_tokens": "embedding", "lm_head": "head", "self_attn": "attention", "mlp": "feed-forward"}
    kinds |= {"linear_attn": "attention", "value_head": "value_head"}
    return next((part for piece, part in kinds.items() if piece in name.split(".")), "other")


def _groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not is_dtensor(tensor):
        return ()
    if any(p.is_partial() for p in tensor.placements):
        raise ValueError(f"a gradient with pending sums has no norm yet: {tensor.placements}")
    return tuple(
        tensor.device_mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        # Not `is_shard`, which is False for a dimension that another axis shards as well.
        if not placement.is_replicate() and tensor.device_mesh.size(axis) > 1
    )
