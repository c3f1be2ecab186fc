"""Gradients summed in the order of one process, over the ranks that share a micro-batch's tokens or outputs.

`train.deterministic_layout` needs this on the axes `tensor` and `context`; `ops.one_order` defines the order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import ops
from lockstep.ops import cuda, native, one_order
from lockstep.ops.bias import bias_gradient, biased
from lockstep.ops.formats import FORMATS
from lockstep.ops.linear import (
    input_gradient,
    product,
    product_sums,
    shared_weight_gradient,
    token_weight_gradient,
    tree_sum,
)
from lockstep.ops.norm import norm_with_scale, token_gradients, trained_norm
from lockstep.ops.opaque import Operator, empty_like
from lockstep.ops.routing import logits_gradients
from lockstep.parallel.exchange import exchanged, gather_rows, group_named, swap_rows


class ContextRows:
    """`ops.one_order.SharedRows` over `group`: each rank has equally many rows, some of which are padding.

    places: the index of each row, in the order of one process, among all ranks' rows in rank order.
    """

    def __init__(self, group: dist.ProcessGroup, padded: int, places: Tensor, local: Tensor):
        """local: this rank's rows, in its order and without padding, as indices in the order of one process."""
        self.group, self.padded, self.places, self.local = group, padded, places, local
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.is_first = self.rank == 0

    def gather(self, local: Tensor) -> Tensor:
        padded = local.new_zeros(self.padded, *local.shape[1:])
        padded[: len(local)] = local
        return gather_rows(padded, self.group).index_select(0, self.places)

    def whole(self, local: Tensor) -> Tensor:
        return exchanged(local, self.group, lambda x, _: self.gather(x), lambda grad, _: self.own_of(grad))

    def own_of(self, whole: Tensor) -> Tensor:
        return whole.index_select(0, self.local)

    def part(self, count: int) -> slice:
        size = -(-count // self.ranks)
        return slice(min(self.rank * size, count), min((self.rank + 1) * size, count))


def target_product(x: Tensor, weight: Tensor) -> Tensor:
    """`ops.linear` for rows that are a loss's targets, shared by several ranks.

    Each rank computes the weight's gradient for some of the outputs, over all rows in one order; the others are zero.
    """
    out: Tensor = _TargetProduct.apply(x, weight)
    return out


class _TargetProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        return input_gradient(grad, weight), shared_weight_gradient(grad, x, one_order.shared_targets())


class _TensorRows:
    """`ops.one_order.GatheredRows` over the tensor axis, then over the ranks with other tokens."""

    def __init__(self, group: dist.ProcessGroup, ndim: int):
        """ndim: of the tensor; 3 if ranks have different heads of all rows."""
        self.group, self.by_heads = group, ndim > 2
        tokens = one_order.shared_tokens()
        self.is_first = dist.get_rank(group) == 0 and (tokens is None or tokens.is_first)

    def gather(self, local: Tensor) -> Tensor:
        rows, tokens = gather_rows(local, self.group), one_order.shared_tokens()
        if self.by_heads:
            rows = torch.cat(rows.chunk(dist.get_world_size(self.group)), 1)
        return rows if tokens is None else tokens.gather(rows)


def _column_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, format: str, group: str, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    form = FORMATS[format]
    if form.gradients is not None:  # with scales of this rank's outputs, and never in one order
        return form.gradients(grad, x, weight, 1, needed)
    grad_x = _input_gradient(grad, form.rounded_weight(weight), group_named(group)) if needed[0] else None
    return grad_x, token_weight_gradient(grad, form.rounded_rows(x)) if needed[1] else None


def _input_gradient(grad: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    if not one_order.is_required():
        return input_gradient(grad, weight)
    ranks = dist.get_world_size(group)
    sums = product_sums(grad, weight.T, one_order.gradient_chunks() // ranks)
    received = swap_rows(sums, group)
    whole = grad.new_zeros(sums.shape)
    whole.chunk(ranks)[dist.get_rank(group)].copy_(tree_sum(received.unflatten(0, (ranks, -1)).unbind()))
    return whole


def _logits_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    return logits_gradients(grad, x, weight, needed, _TensorRows(group_named(group), x.ndim))


column_product = Operator(
    "column_product(Tensor x, Tensor weight, str format, str group) -> Tensor",
    forward=lambda x, weight, format, group: FORMATS[format].linear(x, weight, 1),
    fake=lambda x, weight, format, group: x.new_empty(x.shape[0], weight.shape[0]),
    gradients=_column_gradients,
    kind="linear",
)
"""`x` `[tokens, in]` times this rank's outputs `weight` `[out / ranks, in]`, both in a format of `ops.FORMATS`.

The gradient of `x` is a part of the sum over all ranks' outputs. In one order, it is the complete sum, rounded once,
for this rank's share of the rows, and zero for the others: `exchange.sum_gathered` takes the share.
"""

shared_logits = Operator(
    "shared_logits(Tensor x, Tensor weight, str group) -> Tensor",
    forward=lambda x, weight, group: product_sums(x, weight),
    fake=lambda x, weight, group: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32),
    gradients=_logits_gradients,
    kind="linear",
)
"""`ops.router_logits` of this rank's rows, with a gradient like that of `shared_norm`'s weight."""


def shared_norm(x: Tensor, weight: Tensor, eps: float, offset: bool, group: dist.ProcessGroup) -> Tensor:
    """`ops.rms_norm` of this rank's rows `[rows / ranks, dim]`, or of its heads `[rows, heads / ranks, head_dim]`.

    The gradient of `weight` is that of these rows or heads. In one order, it is the sum over all of them on one rank,
    and zero on the others.
    """
    if torch.compiler.is_compiling():
        return _compiled_norm(x, weight, eps, offset, group.group_name)
    if not (torch.is_grad_enabled() and (native.usable(x) or cuda.usable(x))):
        return ops.rms_norm(x, weight, eps, offset)
    return trained_norm(x, weight, eps, offset, _TensorRows(group, x.ndim))


def _norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: bool, group: str
) -> tuple[Tensor, Tensor]:
    scale = norm_with_scale(x, weight, eps, offset)[1]
    return token_gradients(grad, x, weight, scale, offset, _TensorRows(group_named(group), x.ndim))


_compiled_norm = Operator(
    "shared_norm(Tensor x, Tensor weight, float eps, bool offset, str group) -> Tensor",
    forward=lambda x, weight, eps, offset, group: norm_with_scale(x, weight, eps, offset)[0],
    fake=lambda x, weight, eps, offset, group: empty_like(x),
    gradients=_norm_gradients,
)


def shared_bias(x: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`ops.add_bias` to this rank's rows, with a gradient like that of `shared_norm`'s weight."""
    if torch.compiler.is_compiling():
        return _compiled_bias(x, bias, group.group_name)
    return biased(x, bias, gathered=_TensorRows(group, x.ndim))


def _bias_gradients(grad: Tensor, x: Tensor, bias: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return grad.clone(), bias_gradient(grad, bias, gathered=_TensorRows(group_named(group), grad.ndim))


_compiled_bias = Operator(
    "shared_bias(Tensor x, Tensor bias, str group) -> Tensor",
    forward=lambda x, bias, group: x + bias,
    fake=lambda x, bias, group: torch.empty_like(x),
    gradients=_bias_gradients,
)
