"""The row-parallel product, whose inputs are split over ranks: each rank sums its chunks of the tree of all chunks.

Ranks send float32 sums; each receives those of its tokens and rounds the total once, so the bits are those of one
process with as many chunks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ops.linear import input_gradient, product_sums, token_weight_gradient, tree_sum
from lockstep.ops.opaque import Operator, library
from lockstep.parallel.exchange import gather_rows, group_named, rows_are_whole, sum_rows


def row_product(x: Tensor, weight: Tensor, chunks: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's share of the rows of the whole product `[tokens / ranks, out]`; all rows within `whole_rows`.

    `x` `[tokens, in / ranks]` and `weight` `[out, in / ranks]` are this rank's parts; `chunks`, of the whole product,
    is a multiple of the number of ranks. The backward takes the gradient of the returned rows.
    """
    if chunks % group.size():
        raise ValueError(f"{chunks} chunks of a product are not a multiple of its {group.size()} ranks")
    if not rows_are_whole():
        return _row_product(x, weight, chunks, group.group_name)
    whole = _opaque_whole if torch.compiler.is_compiling() else _whole_product
    return whole(x, weight, chunks, group.group_name)


def _product(x: Tensor, weight: Tensor, chunks: int, name: str) -> Tensor:
    group = group_named(name)
    return sum_rows(product_sums(x, weight, chunks // dist.get_world_size(group)), group).to(x.dtype)


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, chunks: int, group: str, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    whole = gather_rows(grad, group_named(group))
    return input_gradient(whole, weight) if needed[0] else None, token_weight_gradient(whole, x) if needed[1] else None


_row_product = Operator(
    "row_product(Tensor x, Tensor weight, int chunks, str group) -> Tensor",
    forward=_product,
    fake=lambda x, weight, chunks, group: x.new_empty(x.shape[0] // group_named(group).size(), weight.shape[0]),
    gradients=_gradients,
    kind="linear",
)


def _whole_product(x: Tensor, weight: Tensor, chunks: int, name: str) -> Tensor:
    group = group_named(name)
    ranks = dist.get_world_size(group)
    sums = gather_rows(product_sums(x, weight, chunks // ranks), group)
    return tree_sum(sums.unflatten(0, (ranks, -1)).unbind()).to(x.dtype)


_opaque_whole = library.operator(
    "whole_row_product(Tensor x, Tensor weight, int chunks, str group) -> Tensor",
    fake=lambda x, weight, chunks, group: x.new_empty(x.shape[0], weight.shape[0]),
)(_whole_product)
