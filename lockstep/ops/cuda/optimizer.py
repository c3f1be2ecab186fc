"""AdamW's update of one tensor in Triton: every operation is rounded separately, so the bits are those of the CPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.kernel import kernel, launch

BLOCK = 1024


@kernel
def _adamw_kernel(
    master, weight, grad, mean, square, count, scale, decay, beta1, rest1, beta2, rest2, step_size, inverse_root,
    epsilon, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    gradient = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32) * scale
    wide_mean = tl.load(mean + place, mask=mask, other=0.0).to(tl.float32) * beta1 + gradient * rest1
    wide_square = tl.load(square + place, mask=mask, other=0.0).to(tl.float32) * beta2 + gradient * rest2 * gradient
    step = tl.div_rn(wide_mean * step_size, tl.sqrt_rn(wide_square) * inverse_root + epsilon)
    value = tl.load(master + place, mask=mask, other=0.0) * decay - step
    tl.store(mean + place, wide_mean.to(mean.dtype.element_ty), mask=mask)
    tl.store(square + place, wide_square.to(square.dtype.element_ty), mask=mask)
    tl.store(master + place, value, mask=mask)
    if weight is not None:
        tl.store(weight + place, value.to(weight.dtype.element_ty), mask=mask)


def adamw_step(
    master: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    factors: tuple[float, ...],
    scale: float,
    weight: Tensor | None,
) -> None:
    """As `lockstep.ops.adamw_step`, for contiguous tensors; `factors` are the fields of `AdamWFactors`."""
    if count := master.numel():
        launch(
            _adamw_kernel, (triton.cdiv(count, BLOCK),),
            master, weight, grad, mean, square, count, float(scale), *factors, BLOCK=BLOCK, num_warps=4,
            # With fusion, a product and a sum would be rounded once.
            enable_fp_fusion=False,
        )  # fmt: skip
