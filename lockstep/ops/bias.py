"""The bias of a projection."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
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
    if torch.compiler.is_compiling():
        return _opaque(x, bias)
    return biased(x, bias, None)


def biased(
    x: Float[Tensor, "rows dim"], bias: Float[Tensor, "dim"], gathered: one_order.GatheredRows | None
) -> Float[Tensor, "rows dim"]:
    """`add_bias` of a plain bias, whose gradient is summed over the rows of `gathered`."""
    if torch.is_grad_enabled() and (x.requires_grad or bias.requires_grad):
        return _Biased.apply(x, bias, gathered)
    return x + bias


def bias_gradient(
    grad: Float[Tensor, "rows dim"], bias: Float[Tensor, "dim"], gathered: one_order.GatheredRows | None = None
) -> Float[Tensor, "dim"]:
    """The sum over rows, in slabs. With one order, if other ranks have some of the rows, the first rank computes it."""
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
    def forward(ctx: Any, x: Tensor, bias: Tensor, gathered: one_order.GatheredRows | None) -> Tensor:
        ctx.save_for_backward(bias)
        ctx.gathered = gathered
        return x + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (bias,) = ctx.saved_tensors
        return grads[0], bias_gradient(grads[0], bias, ctx.gathered), None


# Opaque because of its gradient: a compiler would choose the order of the sum over rows by their number.
@library.operator("add_bias(Tensor x, Tensor bias) -> Tensor", fake=lambda x, bias: torch.empty_like(x))
def _opaque(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias


@library.operator("bias_gradient(Tensor grad, Tensor bias) -> Tensor", fake=lambda grad, bias: torch.empty_like(bias))
def _opaque_gradient(grad: Tensor, bias: Tensor) -> Tensor:
    return bias_gradient(grad, bias)


library.differentiable(
    "add_bias",
    save=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    backward=lambda ctx, grad: (grad, _opaque_gradient(grad, *ctx.saved_tensors)),
)
