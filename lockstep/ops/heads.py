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
from lockstep.ops.opaque import Operator


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
        return form.head_linear(x, weight, first, stop, across)
    if cuda.usable(x):
        parts = _parts(weight, x.shape[1], first, stop, across)
        return torch.stack([linear(x[:, head], part) for head, part in enumerate(parts)], 1)
    return _head_linear(x, weight, first, stop, across)


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


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, *part: Any, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    grad_x = _input_gradient(grad, weight, *part) if needed[0] else None
    return grad_x, _weight_gradient(grad, x, weight, *part) if needed[1] else None


_head_linear = Operator(
    "head_linear(Tensor x, Tensor weight, int first, int stop, bool across) -> Tensor",
    _products,
    fake=lambda x, weight, first, stop, across: x.new_empty(*x.shape[:2], weight.shape[1] if across else stop - first),
    gradients=_gradients,
    kind="linear",
)
