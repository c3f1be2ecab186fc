"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native
from lockstep.ops.opaque import empty_like, library


def rotary(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens half"],
    sin: Float[Tensor, "tokens half"],
    interleaved: bool = False,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotates the pair (x[i], x[i + half]) by its angle, in float32 (arXiv 2104.09864).

    Features from 2 · half on are copied. interleaved: the pairs are (x[2i], x[2i + 1]) instead, and stay there.

    Raises ValueError if a head has fewer than 2 · half features.
    """
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"a rotation of {2 * cos.shape[-1]} features cannot be of heads with {x.shape[-1]}")
    if torch.compiler.is_compiling() and (interleaved or 2 * cos.shape[-1] < x.shape[-1]):
        return _opaque(x, cos, sin, interleaved, 1.0)
    if torch.compiler.is_compiling() or not _has_kernels(x):
        return _reference(x, cos, sin, interleaved)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotary.apply(x, cos, sin, interleaved)
    return _rotate(x, cos, sin, interleaved, 1.0)


def _has_kernels(x: Tensor) -> bool:
    return native.usable(x) or cuda.usable(x)


def _reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    wide, cos, sin = x[..., :width].float(), cos[:, None], sin[:, None]
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, dim=-1)
    pairs = first * cos - second * sin, second * cos + first * sin
    rotated = (torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)).to(x.dtype)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    if cuda.usable(x):
        from lockstep.ops.cuda import rows

        return rows.rotate(x, cos, sin, interleaved, sign)
    x = x.contiguous()
    out = torch.empty_like(x)
    native.call("rotary", x.dtype, x, cos, sin, out, *x.shape, cos.shape[1], int(interleaved), sign)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, ctx.interleaved, -1.0), None, None, None


# Compiled code calls it as one operator unless all features are rotated, in halves: a compiler's loops over neighbors,
# or over a part of a head, treat rows differently, depending on their number.
@library.operator(
    "rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, float sign) -> Tensor",
    fake=lambda x, cos, sin, interleaved, sign: empty_like(x),
)
def _opaque(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    if _has_kernels(x):
        return _rotate(x, cos, sin, interleaved, sign)
    return _reference(x, cos, sin * sign, interleaved).contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.settings = inputs[3:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    (cos, sin), (interleaved, sign) = ctx.saved_tensors, ctx.settings
    return _opaque(grad, cos, sin, interleaved, -sign), None, None, None, None


library.differentiable("rotary", save=_save, backward=_backward)
