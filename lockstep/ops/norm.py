"""Root-mean-square normalisation of rows."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native


def rms_norm(x: Float[Tensor, "*rows dim"], weight: Float[Tensor, "dim"], eps: float) -> Float[Tensor, "*rows dim"]:
    """`x / sqrt(mean(x²) + eps) * weight`, computed in float32 and rounded once (arXiv 1910.07467)."""
    if cuda.usable(x):
        from lockstep.ops.cuda import rows

        return rows.rms_norm(x, weight, eps)
    if torch.compiler.is_compiling() or not native.usable(x):
        return _reference(x, weight, eps)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps)
    return _forward(x, weight, eps)[0]


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    # A sum over a dimension of its own kind for every row count: `mean` of one row alone may be split over threads.
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    rows = x.numel() // x.shape[-1]
    out = torch.empty_like(x)
    scale = torch.empty(rows, dtype=torch.float32)
    native.call("rms_norm", x.dtype, x, weight, out, scale, rows, x.shape[-1], eps)
    return out, x, scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, x, scale = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_x, grad_weight = torch.empty_like(x), torch.zeros(x.shape[-1], dtype=torch.float32)
        native.call(
            "rms_norm_backward",
            x.dtype,
            grad_out,
            x,
            weight,
            scale,
            grad_x,
            grad_weight,
            scale.numel(),
            x.shape[-1],
        )
        return grad_x, grad_weight.to(weight.dtype), None
