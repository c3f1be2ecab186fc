"""Sums over all elements of a tensor, in float64 and in one order, for any processor and number of threads.

Blocks of `ROWS` · `LANES` elements are summed separately, lane by lane down the rows and then the lanes in a binary
tree; the blocks' sums are summed in the same way, until one is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from lockstep.ops import native

ROWS, LANES = 32, 32
"""A block's shape; also defined in sums.cpp."""


def total(x: Float[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """The sum of all elements, rounded once from float64, with a gradient."""
    # Other devices and tensor types use torch's sum.
    return _Total.apply(x) if type(x) is Tensor and x.device.type == "cpu" else x.sum()


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum() if native.is_pretending() else _sum_of_blocks(x.detach().double().flatten()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].expand(ctx.shape)


def sum_of_squares(x: Float[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """The sum of squares of all elements of a tensor on the CPU, float64."""
    if native.is_pretending():
        return torch.empty((), dtype=torch.float64)
    if not native.usable(x) or not x.is_contiguous():
        return _sum_of_blocks(x.double().flatten().square())
    blocks = torch.empty(-(-x.numel() // (ROWS * LANES)), dtype=torch.float64)
    native.call("block_squares", x.dtype, x, blocks, x.numel())
    return _sum_of_blocks(blocks)


def _sum_of_blocks(values: Float64[Tensor, "count"]) -> Float64[Tensor, ""]:
    sums = values.numpy()
    while len(sums) > 1:
        padded = np.zeros(-(-len(sums) // (ROWS * LANES)) * ROWS * LANES)
        padded[: len(sums)] = sums
        blocks = padded.reshape(-1, ROWS, LANES)
        lanes = blocks[:, 0]
        for row in range(1, min(ROWS, -(-len(sums) // LANES))):
            lanes += blocks[:, row]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        sums = lanes[:, 0]
    return torch.tensor(sums[0] if len(sums) else 0.0, dtype=torch.float64)


EXACT_BITS = 42
"""Bits of an element's rounded square, so that a block's float64 sum is exact."""
_SLICE = 2**22


def integer_squares(x: Float[Tensor, "*shape"], exponent: int) -> Int64[Tensor, ""]:
    """The sum of round(x² · 2^`exponent`) over all elements: exact, and so independent of the order.

    No element may be above 2^EXACT_BITS, and the sum not above 2⁶³.
    """
    if native.usable(x) and x.is_contiguous():
        blocks = torch.empty(-(-x.numel() // (ROWS * LANES)), dtype=torch.int64)
        native.call("integer_squares", x.dtype, x, blocks, x.numel(), exponent)
        return blocks.sum()
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in x.flatten().split(_SLICE):
        total += (part.double().square() * 2.0**exponent).round().long().sum()
    return total
