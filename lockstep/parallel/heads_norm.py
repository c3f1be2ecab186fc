"""The norm over all heads together, of which each tensor rank has some."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ops.norm import norm_with_scale, token_gradients
from lockstep.ops.opaque import Operator, empty_like
from lockstep.parallel.exchange import gather_rows, group_named


def split_heads_norm(x: Tensor, weight: Tensor, eps: float, offset: bool, group: dist.ProcessGroup) -> Tensor:
    """`ops.heads_norm` of this rank's heads `[tokens, heads / ranks, head_dim]`, given the weight of all heads.

    Every rank has all tokens, and normalizes whole rows as one process does. The gradient of `weight` is complete on
    one rank, and zero on the others.
    """
    out: Tensor = _split_heads_norm(x, weight, eps, offset, group.group_name)
    return out


def _all_heads(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every token's features of all heads, `[tokens, features]`."""
    rows = gather_rows(local.flatten(1), group)
    return torch.cat(rows.chunk(group.size()), 1)


def _local_heads(rows: Tensor, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's heads, shaped like `x`."""
    return rows.chunk(group.size(), 1)[group.rank()].contiguous().view(x.shape)


def _forward(x: Tensor, weight: Tensor, eps: float, offset: bool, name: str) -> Tensor:
    group = group_named(name)
    return _local_heads(norm_with_scale(_all_heads(x, group), weight, eps, offset)[0], x, group)


def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: bool,
    name: str,
    needed: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, Tensor]:
    group = group_named(name)
    rows = _all_heads(x, group)
    scale = norm_with_scale(rows, weight, eps, offset)[1]
    grad_x, grad_weight = token_gradients(_all_heads(grad, group), rows, weight, scale, offset)
    return _local_heads(grad_x, x, group), grad_weight if group.rank() == 0 else torch.zeros_like(weight)


_split_heads_norm = Operator(
    "split_heads_norm(Tensor x, Tensor weight, float eps, bool offset, str group) -> Tensor",
    _forward,
    fake=lambda x, weight, eps, offset, group: empty_like(x),
    gradients=_gradients,
    kind="norm",
)
