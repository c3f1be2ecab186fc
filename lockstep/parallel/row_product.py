"""The row-parallel product, whose inputs are split over ranks: each rank sums its chunks of the tree of all chunks.

Ranks send float32 sums; each receives those of its tokens and rounds the total once, so the bits are those of one
process with as many chunks. Integer sums are exact in any order. Where a row's scale depends on all of its numbers, the
ranks first exchange the scales of their parts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ops.formats import FORMATS, Format
from lockstep.ops.integer_linear import scaled_sums
from lockstep.ops.linear import input_gradient, token_weight_gradient, tree_sum
from lockstep.ops.opaque import Operator, library
from lockstep.ops.packed_weights import packed_scales
from lockstep.parallel.exchange import gather_rows, group_named, local_rows, rows_are_whole, sum_rows


def row_product(x: Tensor, weight: Tensor, format: str, chunks: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's share of the rows of the whole product `[tokens / ranks, out]`; all rows within `whole_rows`.

    `x` `[tokens, in / ranks]` and `weight` `[out, in / ranks]` are this rank's parts; `chunks`, of the whole product,
    is a multiple of the number of ranks. The backward takes the gradient of the returned rows. `format`: of the
    factors, a key of `ops.FORMATS`.
    """
    if chunks % group.size():
        raise ValueError(f"{chunks} chunks of a product are not a multiple of its {group.size()} ranks")
    if not rows_are_whole():
        return _row_product(x, weight, format, chunks, group.group_name)
    whole = _opaque_whole if torch.compiler.is_compiling() else _whole_product
    return whole(x, weight, format, chunks, group.group_name)


def _product(x: Tensor, weight: Tensor, format: str, chunks: int, name: str) -> Tensor:
    group, form = group_named(name), FORMATS[format]
    scales = _shared_scales(x, weight, form, group)
    total = sum_rows(form.sums(x, weight, chunks // group.size(), *scales), group)
    if not total.is_floating_point():
        total = scaled_sums(total, local_rows(scales[0], group), scales[1])
    return total.to(x.dtype)


def _shared_scales(x: Tensor, weight: Tensor, form: Format, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The scales of all rows and of all outputs, if their parts on the ranks have them in common."""
    if form.shared is None:
        return ()
    # A rank whose weight is packed sends the scales of all ranks again: the maximum is the same.
    of_outputs = packed_scales(weight, form.shared.layout)
    of_outputs = form.shared.of_part(weight) if of_outputs is None else of_outputs
    of_parts = torch.cat([form.shared.of_part(x), of_outputs])
    # NaN, of a row that is not finite, is the maximum.
    return gather_rows(of_parts[None], group).amax(0).split([x.shape[0], weight.shape[0]])


def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    format: str,
    chunks: int,
    name: str,
    needed: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    group, form = group_named(name), FORMATS[format]
    whole = gather_rows(grad, group)
    if form.gradients is not None:
        return form.gradients(whole, x, weight, chunks, needed)
    scales = _shared_scales(x, weight, form, group)
    of_rows, of_outputs = ({"scales": each} for each in scales) if scales else ({}, {})
    grad_x = input_gradient(whole, form.rounded_weight(weight, **of_outputs)) if needed[0] else None
    return grad_x, token_weight_gradient(whole, form.rounded_rows(x, **of_rows)) if needed[1] else None


_row_product = Operator(
    "row_product(Tensor x, Tensor weight, str format, int chunks, str group) -> Tensor",
    forward=_product,
    fake=lambda x, weight, format, chunks, group: x.new_empty(x.shape[0] // group_named(group).size(), weight.shape[0]),
    gradients=_gradients,
    kind="linear",
)


def _whole_product(x: Tensor, weight: Tensor, format: str, chunks: int, name: str) -> Tensor:
    group, form = group_named(name), FORMATS[format]
    scales = _shared_scales(x, weight, form, group)
    sums = gather_rows(form.sums(x, weight, chunks // group.size(), *scales), group)
    total = tree_sum(sums.unflatten(0, (group.size(), -1)).unbind())
    return (total if total.is_floating_point() else scaled_sums(total, *scales)).to(x.dtype)


_opaque_whole = library.operator(
    "whole_row_product(Tensor x, Tensor weight, str format, int chunks, str group) -> Tensor",
    fake=lambda x, weight, format, chunks, group: x.new_empty(x.shape[0], weight.shape[0]),
)(_whole_product)
