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
from lockstep.ops.linear import (
    input_gradient,
    product,
    product_sums,
    shared_weight_gradient,
    token_weight_gradient,
    tree_sum,
)
from lockstep.ops.needed_gradients import needs_gradient
from lockstep.ops.norm import norm_with_scale, token_gradients, trained_norm
from lockstep.ops.opaque import library
from lockstep.ops.routing import logits_gradients, trained_logits
from lockstep.ops.saved_outputs import saved_output
from lockstep.parallel.exchange import gather_rows, group_named, swap_rows


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
        gathered: Tensor = _Whole.apply(local, self)
        return gathered

    def own_of(self, whole: Tensor) -> Tensor:
        return whole.index_select(0, self.local)

    def part(self, count: int) -> slice:
        size = -(-count // self.ranks)
        return slice(min(self.rank * size, count), min((self.rank + 1) * size, count))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: ContextRows) -> Tensor:
        ctx.rows = rows
        return rows.gather(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.own_of(grads[0]), None


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


def column_product(x: Tensor, weight: Tensor, group: dist.ProcessGroup, part: slice | None = None) -> Tensor:
    """`x` `[tokens, in]` times this rank's outputs `weight` `[out / ranks, in]`.

    part: the outputs whose gradients this rank computes, if several ranks have the same outputs.

    The gradient of `x` is a part of the sum over all ranks' outputs. In one order, it is the complete sum, rounded
    once, for this rank's share of the rows, and zero for the others: `exchange.sum_gathered` takes the share.
    """
    if torch.compiler.is_compiling():
        return _opaque_product(x, weight, group.group_name)
    if not torch.is_grad_enabled():
        return product(x, weight)
    out: Tensor = _ColumnProduct.apply(x, weight, group, part)
    return out


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup, part: slice | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.part = group, part
        return saved_output("linear", lambda: product(x, weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,), (x, weight), part = grads, ctx.saved_tensors, ctx.part
        needed = needs_gradient(ctx, 0), needs_gradient(ctx, 1)
        if part is None:
            return *_product_gradients(grad, x, weight, ctx.group, *needed), None, None
        grad_x, of_part = _product_gradients(grad[:, part], x, weight[part], ctx.group, *needed)
        if of_part is None:
            return grad_x, None, None, None
        grad_weight = torch.zeros_like(weight)
        grad_weight[part] = of_part
        return grad_x, grad_weight, None, None


def _product_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, group: dist.ProcessGroup, of_x: bool = True, of_weight: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    grad_x = None
    if of_x:
        grad_x = (
            _shared_input_gradient(grad, weight, group) if one_order.is_required() else input_gradient(grad, weight)
        )
    return grad_x, token_weight_gradient(grad, x) if of_weight else None


def _shared_input_gradient(grad: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    sums = product_sums(grad, weight.T, one_order.gradient_chunks() // ranks)
    received = swap_rows(sums, group)
    whole = grad.new_zeros(sums.shape)
    whole.chunk(ranks)[dist.get_rank(group)].copy_(tree_sum(received.unflatten(0, (ranks, -1)).unbind()))
    return whole


def shared_norm(x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup, share: int = 1) -> Tensor:
    """`ops.rms_norm` of this rank's rows `[rows / ranks, dim]`, or of its heads `[rows, heads / ranks, head_dim]`.

    share: the number of consecutive ranks that have the same heads.

    The gradient of `weight` is that of these rows or heads. In one order, it is the sum over all of them on one rank,
    and zero on the others.
    """
    if torch.compiler.is_compiling():
        return _opaque_norm(x, weight, eps, group.group_name)[0]
    if not (torch.is_grad_enabled() and (native.usable(x) or cuda.usable(x))):
        return ops.rms_norm(x, weight, eps)
    return trained_norm(x, weight, eps, _TensorRows(group, x.ndim, share))


def shared_bias(x: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`ops.add_bias` to this rank's rows, with a gradient like that of `shared_norm`'s weight."""
    if torch.compiler.is_compiling():
        return _opaque_bias(x, bias, group.group_name)
    return biased(x, bias, gathered=_TensorRows(group, x.ndim))


def shared_logits(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`ops.router_logits` of this rank's rows, with a gradient like that of `shared_norm`'s weight."""
    if torch.compiler.is_compiling():
        return _opaque_logits(x, weight, group.group_name)
    if not torch.is_grad_enabled():
        return product_sums(x, weight)
    return trained_logits(x, weight, _TensorRows(group, x.ndim))


class _TensorRows:
    """`ops.one_order.GatheredRows` over the tensor axis, then over the ranks with other tokens."""

    def __init__(self, group: dist.ProcessGroup, ndim: int, share: int = 1):
        """ndim: of the tensor; 3 if ranks have different heads of all rows, and `share` ranks have the same heads."""
        self.group, self.by_heads, self.share = group, ndim > 2, share
        tokens = one_order.shared_tokens()
        self.is_first = dist.get_rank(group) == 0 and (tokens is None or tokens.is_first)

    def gather(self, local: Tensor) -> Tensor:
        rows, tokens = gather_rows(local, self.group), one_order.shared_tokens()
        if self.by_heads:
            rows = torch.cat(rows.chunk(dist.get_world_size(self.group))[:: self.share], 1)
        return rows if tokens is None else tokens.gather(rows)


@library.operator(
    "column_product(Tensor x, Tensor weight, str group) -> Tensor",
    fake=lambda x, weight, group: x.new_empty(x.shape[0], weight.shape[0]),
)
def _opaque_product(x: Tensor, weight: Tensor, group: str) -> Tensor:
    return product(x, weight)


@library.operator(
    "column_product_gradients(Tensor grad, Tensor x, Tensor weight, str group) -> (Tensor, Tensor)",
    fake=lambda grad, x, weight, group: (torch.empty_like(x), torch.empty_like(weight)),
)
def _opaque_product_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, group: str
) -> tuple[Tensor | None, Tensor | None]:
    return _product_gradients(grad, x, weight, group_named(group))


def _save_product(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.group = inputs[2]


library.differentiable(
    "column_product",
    _save_product,
    lambda ctx, grad: (*_opaque_product_gradients(grad, *ctx.saved_tensors, ctx.group), None),
)


@library.operator(
    "shared_norm(Tensor x, Tensor weight, float eps, str group) -> (Tensor, Tensor)",
    fake=lambda x, weight, eps, group: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    ),
)
def _opaque_norm(x: Tensor, weight: Tensor, eps: float, group: str) -> tuple[Tensor, Tensor]:
    return norm_with_scale(x, weight, eps)


@library.operator(
    "shared_norm_gradients(Tensor grad, Tensor x, Tensor weight, Tensor scale, str group) -> (Tensor, Tensor)",
    fake=lambda grad, x, weight, scale, group: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(weight),
    ),
)
def _opaque_norm_gradients(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return token_gradients(grad, x, weight, scale, _TensorRows(group_named(group), x.ndim))


def _save_norm(ctx: Any, inputs: tuple[Tensor, Tensor, float, str], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.group = inputs[3]


library.differentiable(
    "shared_norm",
    _save_norm,
    lambda ctx, grad, _: (*_opaque_norm_gradients(grad, *ctx.saved_tensors, ctx.group), None, None),
)


@library.operator(
    "shared_bias(Tensor x, Tensor bias, str group) -> Tensor", fake=lambda x, bias, group: torch.empty_like(x)
)
def _opaque_bias(x: Tensor, bias: Tensor, group: str) -> Tensor:
    return x + bias


@library.operator(
    "shared_bias_gradient(Tensor grad, Tensor bias, str group) -> Tensor",
    fake=lambda grad, bias, group: torch.empty_like(bias),
)
def _opaque_bias_gradient(grad: Tensor, bias: Tensor, group: str) -> Tensor:
    return bias_gradient(grad, bias, gathered=_TensorRows(group_named(group), grad.ndim))


def _save_bias(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.group = inputs[2]


library.differentiable(
    "shared_bias",
    _save_bias,
    lambda ctx, grad: (grad, _opaque_bias_gradient(grad, *ctx.saved_tensors, ctx.group), None),
)


@library.operator(
    "shared_logits(Tensor x, Tensor weight, str group) -> Tensor",
    fake=lambda x, weight, group: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32),
)
def _opaque_logits(x: Tensor, weight: Tensor, group: str) -> Tensor:
    return product_sums(x, weight)


@library.operator(
    "shared_logits_gradients(Tensor grad, Tensor x, Tensor weight, str group) -> (Tensor, Tensor)",
    fake=lambda grad, x, weight, group: (torch.empty_like(x), torch.empty_like(weight)),
)
def _opaque_logits_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, group: str
) -> tuple[Tensor | None, Tensor | None]:
    return logits_gradients(grad, x, weight, gathered=_TensorRows(group_named(group), x.ndim))


library.differentiable(
    "shared_logits",
    _save_product,
    lambda ctx, grad: (*_opaque_logits_gradients(grad, *ctx.saved_tensors, ctx.group), None),
)
