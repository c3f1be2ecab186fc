"""The smooth cap of logits and its gradient in Triton, element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.kernel import kernel, launch

TILE = 2048
"""Elements per program."""


@kernel(varying=("count",))
def _softcap_kernel(logits, out, count, cap, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    x = tl.load(logits + place, mask=mask, other=0.0).to(tl.float32) / cap
    # tanh x = x + x³ · P(x²) near zero (Cephes): from an exponential, small logits would lose their last digits.
    square, size = x * x, tl.abs(x)
    y = -5.70498872745e-3 * square + 2.06390887954e-2
    y = y * square - 5.37397155531e-2
    y = y * square + 1.33314422036e-1
    y = y * square - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    tangent = tl.where(size < 0.625, y * square * x + x, tl.where(x < 0, -far, far))
    tl.store(out + place, (tangent * cap).to(out.dtype.element_ty), mask=mask)


@kernel(varying=("count",))
def _softcap_backward_kernel(grad, capped, out, count, cap, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    share = tl.load(capped + place, mask=mask, other=0.0).to(tl.float32) / cap
    result = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32) * (1.0 - share * share)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """As `lockstep.ops.softcap`, without gradient, of contiguous logits."""
    out = torch.empty_like(logits)
    if count := logits.numel():
        launch(_softcap_kernel, (triton.cdiv(count, TILE),), logits, out, count, float(cap), BLOCK=TILE, num_warps=4)
    return out


def softcap_gradient(grad: Tensor, capped: Tensor, cap: float) -> Tensor:
    """As `lockstep.ops.softcap.softcap_gradient`, of contiguous tensors."""
    out = torch.empty_like(capped)
    if count := capped.numel():
        grid = (triton.cdiv(count, TILE),)
        launch(_softcap_backward_kernel, grid, grad, capped, out, count, float(cap), BLOCK=TILE, num_warps=4)
    return out
