"""The weighted sum of each token's expert outputs, and its gradient, in Triton: one program per token.

Products and sums are rounded separately, in the order of the token's choices: the bits of `ops.combine` in PyTorch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.kernel import kernel, launch


@kernel
def _combine_kernel(rows, weights, places, out, ACTIVE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < DIM
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(ACTIVE):
        place = tl.load(places + token * ACTIVE + choice)
        row = tl.load(rows + place * DIM + column, mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            row *= tl.load(weights + token * ACTIVE + choice)
        total += row
    tl.store(out + token * DIM + column, total.to(out.dtype.element_ty), mask=inside)


@kernel
def _combine_backward_kernel(
    grad, rows, weights, places, grad_rows, grad_weights,
    ACTIVE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < DIM
    wide = tl.load(grad + token * DIM + column, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(ACTIVE):
        line = token * ACTIVE + choice
        source = tl.load(places + line) * DIM + column
        row = tl.load(rows + source, mask=inside, other=0.0).to(tl.float32)
        weighted = wide * tl.load(weights + line)
        tl.store(grad_rows + source, weighted.to(grad_rows.dtype.element_ty), mask=inside)
        tl.store(grad_weights + line, tl.sum(wide * row, 0))


def combine(rows: Tensor, weights: Tensor | None, places: Tensor, out: Tensor) -> None:
    """Writes `lockstep.ops.combine`, or without weights the plain sum, of contiguous tensors."""
    if len(out):
        launch(_combine_kernel, (len(out),), rows, weights, places, out, **_sizes(out, places))


def combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, grad_rows: Tensor, grad_weights: Tensor
) -> None:
    """Writes the gradients of contiguous `rows` and `weights`."""
    if len(grad):
        tensors = grad, rows, weights, places, grad_rows, grad_weights
        launch(_combine_backward_kernel, (len(grad),), *tensors, **_sizes(grad, places))


def _sizes(by_token: Tensor, places: Tensor) -> dict[str, int]:
    tokens, dim = by_token.shape
    block = triton.next_power_of_2(dim)
    warps = min(8, max(1, block // 512))
    return dict(ACTIVE=len(places) // tokens, DIM=dim, BLOCK=block, num_warps=warps, enable_fp_fusion=False)
