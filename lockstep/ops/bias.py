"""The bias of a projection, or of each expert's."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import native, one_order
from lockstep.ops.forms import FORMS
from lockstep.ops.opaque import library


def add_bias(x: Float[Tensor, "rows dim"], bias: Float[Tensor, "dim"]) -> Float[Tensor, "rows dim"]:
    """`x + bias` for an already rounded product: product and sum are each rounded once, to its dtype.

    The bias could instead be part of the product's sum, with a single rounding; but then ranks that each compute a part
    of the sum would have to agree on which one adds the bias, and where. Libraries also differ here, in bfloat16 by one
    rounding.
    """
    if (form := FORMS.get(type(bias))) is not None:
        return form.add_bias(x, bias)
    return biased(x, bias)


def add_grouped_bias(
    x: Float[Tensor, "rows dim"], bias: Float[Tensor, "groups dim"], starts: Int[Tensor, "groups+1"]
) -> Float[Tensor, "rows dim"]:
    """`add_bias` of each group's bias, `bias[g]`, to rows `starts[g]` to `starts[g + 1]`."""
    return biased(x, bias, starts)


def biased(
    x: Float[Tensor, "rows dim"],
    bias: Float[Tensor, "*groups dim"],
    starts: Int[Tensor, "bounds"] | None = None,
    gathered: one_order.GatheredRows | None = None,
) -> Float[Tensor, "rows dim"]:
    """`add_bias` of a plain bias, or with `starts` `add_grouped_bias`. The gradient of a bias without groups is summed
    over the rows of `gathered`."""
    if torch.compiler.is_compiling():
        return _opaque(x, bias, starts)
    if torch.is_grad_enabled() and (x.requires_grad or bias.requires_grad):
        return _Biased.apply(x, bias, starts, gathered)
    return _sum(x, bias, starts)


def _sum(x: Tensor, bias: Tensor, starts: Tensor | None) -> Tensor:
    if starts is None:
        return x + bias
    if x.is_meta or native.is_pretending():
        return torch.empty_like(x)
    return x + bias.repeat_interleave(starts.diff().to(bias.device), 0, output_size=x.shape[0])


def bias_gradient(
    grad: Float[Tensor, "rows dim"],
    bias: Float[Tensor, "*groups dim"],
    starts: Int[Tensor, "bounds"] | None = None,
    gathered: one_order.GatheredRows | None = None,
) -> Float[Tensor, "*groups dim"]:
    """The sum over all rows, or each group's, in slabs. With one order, if other ranks have some of the rows, the first
    rank computes it."""
    if starts is not None:
        if native.is_pretending():
            return torch.empty_like(bias)
        bounds = starts.tolist()
        return torch.stack([column_sums(grad[first:stop]) for first, stop in zip(bounds, bounds[1:])]).to(bias.dtype)
    gathered = gathered or one_order.shared_tokens()
    if gathered is None or not one_order.is_required():
        return column_sums(grad).to(bias.dtype)
    grad = gathered.gather(grad)
    return column_sums(grad).to(bias.dtype) if gathered.is_first else torch.zeros_like(bias)


def column_sums(x: Float[Tensor, "rows dim"]) -> Float[Tensor, "dim"]:
    """Sums over rows, in float32, in slabs of 64 rows that are added in order."""
    if not native.usable(x):
        return x.float().sum(0)
    sums = torch.zeros(x.shape[1], dtype=torch.float32)
    native.call("column_sums", x.dtype, x.contiguous(), sums, *x.shape)
    return sums


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, starts: Tensor | None, gathered: Any) -> Tensor:
        ctx.save_for_backward(bias, starts)
        ctx.gathered = gathered
        return _sum(x, bias, starts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        bias, starts = ctx.saved_tensors
        return grads[0], bias_gradient(grads[0], bias, starts, ctx.gathered), None, None


# Opaque because of its gradient: a compiler would choose the order of the sum over rows by their number.
@library.operator(
    "add_bias(Tensor x, Tensor bias, Tensor? starts=None) -> Tensor", fake=lambda x, *_: torch.empty_like(x)
)
def _opaque(x: Tensor, bias: Tensor, starts: Tensor | None = None) -> Tensor:
    return _sum(x, bias, starts)


@library.operator(
    "bias_gradient(Tensor grad, Tensor bias, Tensor? starts) -> Tensor",
    fake=lambda grad, bias, starts: torch.empty_like(bias),
)
def _opaque_gradient(grad: Tensor, bias: Tensor, starts: Tensor | None) -> Tensor:
    return bias_gradient(grad, bias, starts)


library.differentiable(
    "add_bias",
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
    backward=lambda ctx, grad: (grad, _opaque_gradient(grad, *ctx.saved_tensors), None),
)
