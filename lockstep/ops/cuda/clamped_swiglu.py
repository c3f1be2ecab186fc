"""The clamped gated activation in Triton, with its gradient. Every element is computed independently."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.cuda.rows import TILE


@kernel
def _forward_kernel(gate, up, out, count, SLOPE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    wide = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    # Comparisons propagate NaN.
    wide = tl.where(wide > LIMIT, LIMIT, wide)
    factor = tl.where(factor > LIMIT, LIMIT, tl.where(factor < -LIMIT, -LIMIT, factor))
    result = (factor + 1.0) * (wide / (1.0 + tl.exp(-(SLOPE * wide))))
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    grad_out, gate, up, grad_gate, grad_up, count, SLOPE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    grad = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
    unclamped = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    wide = tl.where(unclamped > LIMIT, LIMIT, unclamped)
    factor = tl.where(other > LIMIT, LIMIT, tl.where(other < -LIMIT, -LIMIT, other))
    sigmoid = 1.0 / (1.0 + tl.exp(-(SLOPE * wide)))
    slope = (factor + 1.0) * sigmoid * (1.0 + SLOPE * wide * (1.0 - sigmoid))
    of_gate = tl.where(unclamped > LIMIT, 0.0, grad * slope)
    of_up = tl.where((other > LIMIT) | (other < -LIMIT), 0.0, grad * wide * sigmoid)
    tl.store(grad_gate + place, of_gate.to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + place, of_up.to(grad_up.dtype.element_ty), mask=mask)


def forward(gate: Tensor, up: Tensor, slope: float, limit: float) -> Tensor:
    """As `lockstep.ops.clamped_swiglu`, without gradient, of contiguous tensors."""
    out, count = torch.empty_like(gate), gate.numel()
    if count:
        launch(
            _forward_kernel,
            (triton.cdiv(count, TILE),),
            gate,
            up,
            out,
            count,
            SLOPE=slope,
            LIMIT=limit,
            BLOCK=TILE,
            num_warps=4,
        )
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor, slope: float, limit: float) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `up`."""
    grad_gate, grad_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    if count:
        launch(
            _backward_kernel,
            (triton.cdiv(count, TILE),),
            grad,
            gate,
            up,
            grad_gate,
            grad_up,
            count,
            SLOPE=slope,
            LIMIT=limit,
            BLOCK=TILE,
            num_warps=4,
        )
    return grad_gate, grad_up
