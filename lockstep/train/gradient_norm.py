"""The norm of all gradients together, however they are spread over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


@torch.no_grad()
def gradient_norm(grads: Iterable[Tensor], further_groups: Iterable[dist.ProcessGroup] = ()) -> Tensor:
    """The Euclidean norm, float32, the same on every rank.

    A DTensor's shards are summed over the mesh axes that it is sharded on, and its copies count once. Over
    `further_groups`, whose ranks hold different parameters (the stages of a pipeline), all is summed. Gradients with
    pending sums are refused with a ValueError: their norm is not that of their parts.
    """
    squares: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for grad in grads:
        if isinstance(grad, DTensor):
            squares[_groups(grad)].append(grad.to_local())
        else:
            squares[()].append(grad)
    total = torch.zeros((), dtype=torch.float32)
    for groups, parts in squares.items():
        own = torch.stack([n.float() for n in torch._foreach_norm(parts)]).square().sum()
        for group in groups:
            dist.all_reduce(own, group=group)
        total = total.to(own.device) + own
    for group in further_groups:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def _groups(grad: DTensor) -> tuple[dist.ProcessGroup, ...]:
    if any(isinstance(p, Partial) for p in grad.placements):
        raise ValueError(f"a gradient with pending sums has no norm yet: {grad.placements}")
    return tuple(
        grad.device_mesh.get_group(axis)
        for axis, placement in enumerate(grad.placements)
        # Not `is_shard`, which denies it of a dimension that another axis cuts as well.
        if not placement.is_replicate() and grad.device_mesh.size(axis) > 1
    )
