"""The row-parallel product, whose inputs are split over ranks: each rank sums its chunks of the tree of all chunks.

Ranks send float32 sums; each receives those of its tokens and rounds the total once, so the bits are those of one
process with as many chunks. With `overlap`, a rank's rows are multiplied in slices, and a slice's sums are sent while
the next is multiplied (asynchronous tensor parallelism); in the backward pass, each slice's all-gather overlaps with
the product of the slice before. A row's bits do not depend on other rows: only the time changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ops.linear import input_gradient, product_sums, token_weight_gradient, tree_sum
from lockstep.ops.needed_gradients import needs_gradient
from lockstep.ops.opaque import library
from lockstep.ops.saved_outputs import saved_output
from lockstep.parallel.exchange import all_gather, gather_rows, group_named, rows_are_whole, sum_rows

OVERLAPPED = 4
"""Slices of a rank's tokens. The first product and the last sum are not overlapped: a quarter of each remains."""
_slices = 1


def overlap(asynchronous: bool) -> None:
    """Sets whether this process computes row products in slices; see `ParallelConfig.asynchronous_tensor`."""
    global _slices
    _slices = OVERLAPPED if asynchronous else 1


def row_product(x: Tensor, weight: Tensor, chunks: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's share of the rows of the whole product `[tokens / ranks, out]`; all rows within `whole_rows`.

    `x` `[tokens, in / ranks]` and `weight` `[out, in / ranks]` are this rank's parts; `chunks`, of the whole product,
    is a multiple of the number of ranks. The backward takes the gradient of the returned rows.
    """
    if chunks % group.size():
        raise ValueError(f"{chunks} chunks of a product are not a multiple of its {group.size()} ranks")
    if torch.compiler.is_compiling():
        operator = _opaque_whole if rows_are_whole() else _opaque_product
        return operator(x, weight, chunks, group.group_name)
    if rows_are_whole():
        return _whole_product(x, weight, chunks, group)
    out: Tensor = _RowProduct.apply(x, weight, chunks, group)
    return out


def _whole_product(x: Tensor, weight: Tensor, chunks: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    sums = gather_rows(product_sums(x, weight, chunks // ranks), group)
    return tree_sum(sums.unflatten(0, (ranks, -1)).unbind()).to(x.dtype)


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return saved_output("linear", lambda: _product(x, weight, chunks, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        return *_gradients(grads[0], x, weight, ctx.group, needs_gradient(ctx, 0), needs_gradient(ctx, 1)), None, None


def _product(x: Tensor, weight: Tensor, chunks: int, group: dist.ProcessGroup) -> Tensor:
    if _slices == 1:
        return sum_rows(product_sums(x, weight, chunks // dist.get_world_size(group)), group).to(x.dtype)
    ranks = dist.get_world_size(group)
    by_rank = x.unflatten(0, (ranks, -1))
    out = x.new_empty(by_rank.shape[1], weight.shape[0])
    in_flight = []
    for rows in _row_slices(out.shape[0]):
        sums = product_sums(by_rank[:, rows].flatten(0, 1), weight, chunks // ranks)
        received = torch.empty_like(sums)
        work = dist.all_to_all_single(received, sums, group=group, async_op=True)
        in_flight.append((rows, received, sums, work))  # `sums` is kept alive until it has been received
    for rows, received, _, work in in_flight:
        work.wait()
        out[rows] = tree_sum(received.unflatten(0, (ranks, -1)).unbind(), overwrite=True)
    return out


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, group: dist.ProcessGroup, of_x: bool = True, of_weight: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    if _slices == 1:
        whole = gather_rows(grad, group)
        return input_gradient(whole, weight) if of_x else None, token_weight_gradient(whole, x) if of_weight else None
    local, ranks = grad.contiguous(), dist.get_world_size(group)
    in_flight = []
    for rows in _row_slices(local.shape[0]):
        gathered = local.new_empty(ranks, rows.stop - rows.start, local.shape[1])
        work = all_gather(gathered.flatten(0, 1), local[rows], group=group, async_op=True)
        in_flight.append((rows, gathered, work))
    whole = local.new_empty(ranks, *local.shape)
    grad_x = torch.empty_like(x) if of_x else None
    for rows, gathered, work in in_flight:
        work.wait()
        whole[:, rows] = gathered
        if grad_x is not None:
            part = input_gradient(gathered.flatten(0, 1), weight)
            grad_x.unflatten(0, (ranks, -1))[:, rows] = part.unflatten(0, (ranks, -1))
    return grad_x, token_weight_gradient(whole.flatten(0, 1), x) if of_weight else None


def _row_slices(rows: int) -> Iterator[slice]:
    size = max(1, -(-rows // _slices))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


@library.operator(
    "row_product(Tensor x, Tensor weight, int chunks, str group) -> Tensor",
    fake=lambda x, weight, chunks, group: x.new_empty(x.shape[0] // group_named(group).size(), weight.shape[0]),
)
def _opaque_product(x: Tensor, weight: Tensor, chunks: int, group: str) -> Tensor:
    return _product(x, weight, chunks, group_named(group))


@library.operator(
    "row_product_gradients(Tensor grad, Tensor x, Tensor weight, str group) -> (Tensor, Tensor)",
    fake=lambda grad, x, weight, group: (torch.empty_like(x), torch.empty_like(weight)),
)
def _opaque_gradients(grad: Tensor, x: Tensor, weight: Tensor, group: str) -> tuple[Tensor | None, Tensor | None]:
    return _gradients(grad, x, weight, group_named(group))


@library.operator(
    "whole_row_product(Tensor x, Tensor weight, int chunks, str group) -> Tensor",
    fake=lambda x, weight, chunks, group: x.new_empty(x.shape[0], weight.shape[0]),
)
def _opaque_whole(x: Tensor, weight: Tensor, chunks: int, group: str) -> Tensor:
    return _whole_product(x, weight, chunks, group_named(group))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int, str], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.group = inputs[3]


library.differentiable(
    "row_product", _save, lambda ctx, grad: (*_opaque_gradients(grad, *ctx.saved_tensors, ctx.group), None, None)
)
