"""gpt-oss's experts: gate and up interleaved in one product's outputs; biases, and the clamped activation."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from lockstep.ops import native
from lockstep.ops.bias import column_sums
from lockstep.ops.clamped_swiglu import clamped_swiglu
from lockstep.ops.experts import combine, dispatch, order_by_expert
from lockstep.ops.forms import FORMS
from lockstep.ops.grouped_linear import grouped_linear
from lockstep.ops.opaque import library


def clamped_experts(
    x: Float[Tensor, "tokens dim"],
    weights: Float32[Tensor, "tokens active"],
    chosen: Int[Tensor, "tokens active"],
    gate_up: Float[Tensor, "experts 2*inner dim"],
    gate_up_bias: Float[Tensor, "experts 2*inner"],
    down: Float[Tensor, "experts dim inner"],
    down_bias: Float[Tensor, "experts dim"],
) -> Float[Tensor, "tokens dim"]:
    """The weighted sum of each token's `chosen` experts, as in `experts`."""
    if (form := FORMS.get(type(gate_up))) is not None:
        return form.clamped_experts(x, weights, chosen, gate_up, gate_up_bias, down, down_bias)
    starts, places, sources = order_by_expert(chosen, gate_up.shape[0])
    rows = clamped_feed_forward(dispatch(x, places, sources), starts, gate_up, gate_up_bias, down, down_bias)
    return combine(rows, weights, places)


def clamped_feed_forward(
    rows: Tensor, starts: Tensor, gate_up: Tensor, gate_up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Float[Tensor, "rows dim"]:
    """Each row through its expert; the rows of expert e are `starts[e]` to `starts[e + 1]`."""
    both = add_grouped_bias(grouped_linear(rows, gate_up, starts), gate_up_bias, starts)
    gated = clamped_swiglu(both[:, ::2], both[:, 1::2])
    return add_grouped_bias(grouped_linear(gated, down, starts), down_bias, starts)


def add_grouped_bias(
    x: Float[Tensor, "rows dim"], bias: Float[Tensor, "groups dim"], starts: Int[Tensor, "groups+1"]
) -> Float[Tensor, "rows dim"]:
    """`add_bias` of each group's bias, `bias[g]`, to rows `starts[g]` to `starts[g + 1]`."""
    if torch.compiler.is_compiling():
        return _opaque(x, bias, starts)
    if torch.is_grad_enabled() and (x.requires_grad or bias.requires_grad):
        return _GroupedBias.apply(x, bias, starts)
    return _forward(x, bias, starts)


def _forward(x: Tensor, bias: Tensor, starts: Tensor) -> Tensor:
    if x.is_meta or native.is_pretending():
        return torch.empty_like(x)
    return x + bias.repeat_interleave(starts.diff().to(bias.device), 0, output_size=x.shape[0])


def _gradient(grad: Tensor, bias: Tensor, starts: Tensor) -> Tensor:
    """The gradient of the bias: each group's rows are summed in the order in which `add_bias` sums all rows."""
    if native.is_pretending():
        return torch.empty_like(bias)
    bounds = starts.tolist()
    return torch.stack([column_sums(grad[first:stop]) for first, stop in zip(bounds, bounds[1:])]).to(bias.dtype)


class _GroupedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(bias, starts)
        return _forward(x, bias, starts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], _gradient(grads[0], *ctx.saved_tensors), None


@library.operator(
    "add_grouped_bias(Tensor x, Tensor bias, Tensor starts) -> Tensor", fake=lambda x, bias, starts: torch.empty_like(x)
)
def _opaque(x: Tensor, bias: Tensor, starts: Tensor) -> Tensor:
    return _forward(x, bias, starts)


@library.operator(
    "grouped_bias_gradient(Tensor grad, Tensor bias, Tensor starts) -> Tensor",
    fake=lambda grad, bias, starts: torch.empty_like(bias),
)
def _opaque_gradient(grad: Tensor, bias: Tensor, starts: Tensor) -> Tensor:
    return _gradient(grad, bias, starts)


library.differentiable(
    "add_grouped_bias",
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
    backward=lambda ctx, grad: (grad, _opaque_gradient(grad, *ctx.saved_tensors), None),
)
