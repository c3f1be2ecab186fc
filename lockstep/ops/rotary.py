"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native


def rotary(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotates the pair (x[i], x[i + head_dim/2]) by its angle, in float32 (arXiv 2104.09864, half-split layout)."""
    if torch.compiler.is_compiling() or not (native.usable(x) or cuda.usable(x)):
        return _reference(x, cos, sin)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotary.apply(x, cos, sin)
    return _rotate(x, cos, sin, 1.0)


def _reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    if cuda.usable(x):
        from lockstep.ops.cuda import rows

        return rows.rotate(x, cos, sin, sign)
    x = x.contiguous()
    out = torch.empty_like(x)
    native.call("rotary", x.dtype, x, cos, sin, out, *x.shape, sign)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1.0), None, None
