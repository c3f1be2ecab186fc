"""The smooth cap of logits, as Gemma 2 and nanochat have it (arXiv 2408.00118, section 2)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native, plain

NEAR = 0.625
"""Below it, tanh x = x + x³ · P(x²), with the coefficients of Cephes."""
TANGENT = (-3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3)


def softcap(logits: Float[Tensor, "*rows vocab"], cap: float) -> Float[Tensor, "*rows vocab"]:
    """`cap · tanh(logits / cap)`, computed in float32 and rounded once; `cap` is above 0."""
    if torch.is_grad_enabled() and logits.requires_grad:
        out: Tensor = _Softcap.apply(logits, cap)
        return out
    return _capped(logits, cap)


def softcap_gradient(
    grad: Float[Tensor, "*rows vocab"], capped: Float[Tensor, "*rows vocab"], cap: float
) -> Float[Tensor, "*rows vocab"]:
    """The gradient of logits, given that of the `capped` ones: times `1 - (capped / cap)²`."""
    if cuda.usable(capped):
        from lockstep.ops.cuda import softcap

        return softcap.softcap_gradient(grad.contiguous(), capped.contiguous(), cap)
    if native.usable(capped):
        grad, capped = grad.contiguous(), capped.contiguous()
        out = torch.empty_like(capped)
        native.call("softcap_backward", capped.dtype, grad, capped, out, out.numel(), float(cap))
        return out
    share = capped.float() / cap
    return (grad.float() * (1.0 - share * share)).to(capped.dtype)


def _capped(logits: Tensor, cap: float) -> Tensor:
    if cuda.usable(logits):
        from lockstep.ops.cuda import softcap

        return softcap.softcap(logits.contiguous(), cap)
    if native.usable(logits):
        logits = logits.contiguous()
        out = torch.empty_like(logits)
        native.call("softcap", logits.dtype, logits, out, out.numel(), float(cap))
        return out
    return (_tangent(logits.float() / cap) * cap).to(logits.dtype)


def _tangent(x: Tensor) -> Tensor:
    """tanh of float32. Not the library's, which computes a tensor's last elements by other code."""
    square, size = x * x, x.abs()
    y = torch.full_like(x, TANGENT[-1])
    for coefficient in TANGENT[-2::-1]:
        y = y * square
        y = y + coefficient
    near = (y * square) * x + x
    far = 1.0 - 2.0 / (plain.exp(2.0 * size) + 1.0)
    return torch.where(size < NEAR, near, torch.where(x < 0, -far, far))


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        out = _capped(logits, cap)
        ctx.save_for_backward(out)
        ctx.cap = cap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return softcap_gradient(grads[0], out, ctx.cap), None
