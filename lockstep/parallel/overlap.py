"""Row products whose sums travel while the next rows are multiplied (asynchronous tensor parallelism).

A rank's rows are multiplied in chunks, and each chunk's reduce-scatter runs beside the next chunk's product; in the
backward pass each chunk's all-gather runs beside the product of the one before. A row's bits depend on no other row,
so they are those of one product: nothing but the time changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep import ops
from lockstep.ops.linear import input_gradient, weight_gradient
from lockstep.parallel.exchange import all_gather, reduce_scatter
from lockstep.parallel.operators import (
    attend,
    axes_of,
    embedding,
    place_on,
    rms_norm,
    rotary,
    run,
    silu_mul,
    token_log_probs,
)
from lockstep.parallel.operators import linear as linear_at_once
from lockstep.parallel.placements import COLUMNS

__all__ = ["attend", "embedding", "linear", "rms_norm", "rotary", "silu_mul", "token_log_probs"]

CHUNKS = 4
"""Of a rank's tokens. The first product and the last sum are not hidden: a quarter of each remains."""


def linear(x: Tensor, weight: DTensor) -> Tensor:
    """As the plain one; a row product's sum is hidden behind it."""
    if place_on(weight, "tensor") != COLUMNS:
        return linear_at_once(x, weight)
    group = weight.device_mesh.get_group(axes_of(weight.device_mesh).index("tensor"))
    return run("overlapped row product", lambda x, weight: _OverlappedProduct.apply(x, weight, group), x, weight)


def _chunks(tokens: int) -> Iterator[slice]:
    size = max(1, -(-tokens // CHUNKS))
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


class _OverlappedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        by_rank = x.unflatten(0, (dist.get_world_size(group), -1))
        out = x.new_empty(by_rank.shape[1], weight.shape[0])
        under_way = []
        for rows in _chunks(out.shape[0]):
            product = ops.linear(by_rank[:, rows].flatten(0, 1), weight)
            under_way.append((reduce_scatter(out[rows], product, group=group, async_op=True), product))
        for work, _ in under_way:
            work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        own = grads[0].contiguous()
        ranks = dist.get_world_size(ctx.group)
        under_way = []
        for rows in _chunks(own.shape[0]):
            gathered = own.new_empty(ranks, rows.stop - rows.start, own.shape[1])
            work = all_gather(gathered.flatten(0, 1), own[rows], group=ctx.group, async_op=True)
            under_way.append((rows, gathered, work))
        whole = own.new_empty(ranks, *own.shape)
        grad_x = torch.empty_like(x)
        by_rank = grad_x.unflatten(0, (ranks, -1))
        for rows, gathered, work in under_way:
            work.wait()
            whole[:, rows] = gathered
            by_rank[:, rows] = input_gradient(gathered.flatten(0, 1), weight).unflatten(0, (ranks, -1))
        return grad_x, weight_gradient(whole.flatten(0, 1), x), None
