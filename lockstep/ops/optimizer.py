"""AdamW's update of one tensor: every operation is rounded separately, so the bits are the same on every device."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native
from lockstep.ops.elementary import power


class AdamWFactors(NamedTuple):
    """The factors shared by all elements of a step, in the order of optimizer.cpp's parameters."""

    decay: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    step_size: float
    inverse_root: float
    epsilon: float


@lru_cache(maxsize=64)
def adamw_factors(
    step: int, learning_rate: float, weight_decay: float, beta1: float, beta2: float, epsilon: float
) -> AdamWFactors:
    """The factors of step number `step`, counted from 1 (arXiv 1711.05101)."""
    return AdamWFactors(
        decay=1.0 - learning_rate * weight_decay,
        beta1=beta1,
        rest1=1.0 - beta1,
        beta2=beta2,
        rest2=1.0 - beta2,
        step_size=learning_rate / (1.0 - power(beta1, step)),
        inverse_root=1.0 / math.sqrt(1.0 - power(beta2, step)),
        epsilon=epsilon,
    )


@torch.no_grad()
def adamw_step(
    master: Float[Tensor, "*shape"],
    grad: Float[Tensor, "*shape"],
    mean: Float[Tensor, "*shape"],
    square: Float[Tensor, "*shape"],
    factors: AdamWFactors,
    scale: float = 1.0,
    weight: Float[Tensor, "*shape"] | None = None,
) -> None:
    """Updates float32 `master`, and the moments `mean` and `square` (float32 or bfloat16), in place.

    `grad` is converted to float32 and multiplied by `scale` first. `weight` gets the new `master`, rounded to its
    dtype.
    """
    tensors = [master, mean, square] if weight is None else [master, mean, square, weight]
    narrow = weight is None or weight.dtype == torch.bfloat16
    has_kernel = cuda.usable(master) or (narrow and native.usable(mean))
    if not (has_kernel and all(tensor.is_contiguous() for tensor in tensors)):
        return _reference(master, grad, mean, square, factors, scale, weight)
    if cuda.usable(master):
        from lockstep.ops.cuda.optimizer import adamw_step as triton_step

        triton_step(master, grad.contiguous(), mean, square, factors, scale, weight)
        torch.autograd.graph.increment_version(tensors)
        return
    kernel, grad = ("adamw_narrow_grad", grad) if grad.dtype == torch.bfloat16 else ("adamw", grad.float())
    buffers = master, weight, grad.contiguous(), mean, square
    native.call(kernel, mean.dtype, *buffers, master.numel(), scale, *factors)
    # Autograd does not see these writes: bump the version, so that packed copies of a weight are invalidated.
    torch.autograd.graph.increment_version(tensors)


@torch.no_grad()
def _reference(
    master: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    factors: AdamWFactors,
    scale: float = 1.0,
    weight: Tensor | None = None,
) -> None:
    grad = grad.float() * scale
    wide_mean = mean.float() * factors.beta1 + grad * factors.rest1
    wide_square = square.float() * factors.beta2 + grad * factors.rest2 * grad
    mean.copy_(wide_mean)
    square.copy_(wide_square)
    # NumPy's square root is the processor's, which is correctly rounded; torch may call a library.
    on_cpu = wide_square.device.type == "cpu"
    root = torch.from_numpy(np.sqrt(wide_square.numpy())) if on_cpu else wide_square.sqrt()
    master.copy_(
        master * factors.decay - wide_mean * factors.step_size / (root * factors.inverse_root + factors.epsilon)
    )
    if weight is not None:
        weight.copy_(master)
