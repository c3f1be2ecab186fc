"""Products with one weight per head, which latent attention uses in addition to `linear`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda
from lockstep.ops.forms import FORMS
from lockstep.ops.grouped_linear import grouped_linear
from lockstep.ops.linear import input_gradient, linear, token_weight_gradient
from lockstep.ops.needed_gradients import needs_gradient
from lockstep.ops.opaque import library
from lockstep.ops.saved_outputs import saved_output


def head_linear(
    x: Float[Tensor, "tokens heads in"],
    weight: Float[Tensor, "rows width"],
    first: int,
    stop: int,
    across: bool = False,
) -> Float[Tensor, "tokens heads out"]:
    """Each head's features times its part of `weight`; the bits of a row do not depend on other rows or heads.

    The weight's rows are divided evenly among the heads. A part is rows `first` to `stop` of a head's rows:
    `[out, width]` as in `linear`, or with `across` its transpose.
    """
    if (form := FORMS.get(type(weight))) is not None:
        out: Tensor = form.head_linear(x, weight, first, stop, across)
        return out
    if cuda.usable(x):
        parts = _parts(weight, x.shape[1], first, stop, across)
        return torch.stack([linear(x[:, head], part) for head, part in enumerate(parts)], 1)
    if torch.compiler.is_compiling():
        return _opaque(x, weight, first, stop, across)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _HeadLinear.apply(x, weight, first, stop, across)
    return _products(x, weight, first, stop, across)


def _stacked(weight: Tensor, heads: int, first: int, stop: int, across: bool) -> Tensor:
    """Every head's part, `[heads, out, in]`."""
    parts = weight.unflatten(0, (heads, -1))[:, first:stop]
    return parts.mT if across else parts


def _parts(weight: Tensor, heads: int, first: int, stop: int, across: bool) -> tuple[Tensor, ...]:
    return _stacked(weight, heads, first, stop, across).unbind()


def _products(x: Tensor, weight: Tensor, first: int, stop: int, across: bool) -> Tensor:
    tokens, heads = x.shape[:2]
    rows = x.transpose(0, 1).contiguous().flatten(0, 1)  # head by head
    starts = torch.arange(heads + 1, device=x.device) * tokens
    with torch.no_grad():
        out = grouped_linear(rows, _stacked(weight, heads, first, stop, across), starts)
    return out.unflatten(0, (heads, tokens)).transpose(0, 1).contiguous()


def _input_gradient(grad: Tensor, weight: Tensor, first: int, stop: int, across: bool) -> Tensor:
    parts = _parts(weight, grad.shape[1], first, stop, across)
    return torch.stack([input_gradient(grad[:, head], part) for head, part in enumerate(parts)], 1)


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, first: int, stop: int, across: bool) -> Tensor:
    whole = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    for head, part in enumerate(_parts(whole, x.shape[1], first, stop, across)):
        part.copy_(token_weight_gradient(grad[:, head], x[:, head]))
    return whole


class _HeadLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, first: int, stop: int, across: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.part = first, stop, across
        return saved_output("linear", lambda: _products(x, weight, first, stop, across))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        grad_x = _input_gradient(grad, weight, *ctx.part) if needs_gradient(ctx, 0) else None
        return (
            grad_x,
            _weight_gradient(grad, x, weight, *ctx.part) if needs_gradient(ctx, 1) else None,
            None,
            None,
            None,
        )


@library.operator(
    "head_linear(Tensor x, Tensor weight, int first, int stop, bool across) -> Tensor",
    fake=lambda x, weight, first, stop, across: x.new_empty(*x.shape[:2], weight.shape[1] if across else stop - first),
)
def _opaque(x: Tensor, weight: Tensor, first: int, stop: int, across: bool) -> Tensor:
    return _products(x, weight, first, stop, across)


@library.operator(
    "head_linear_gradients(Tensor grad, Tensor x, Tensor weight, int first, int stop, bool across) -> (Tensor, Tensor)",
    fake=lambda grad, x, weight, first, stop, across: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(weight, memory_format=torch.contiguous_format),
    ),
)
def _opaque_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, first: int, stop: int, across: bool
) -> tuple[Tensor, Tensor]:
    part = first, stop, across
    return _input_gradient(grad, weight, *part), _weight_gradient(grad, x, weight, *part)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int, int, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.part = inputs[2:]


library.differentiable(
    "head_linear",
    _save,
    lambda ctx, grad: (*_opaque_gradients(grad, *ctx.saved_tensors, *ctx.part), None, None, None),
)
