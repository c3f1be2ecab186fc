"""Float8 products by the tensor cores of NVIDIA GPUs (`torch._scaled_mm`). Not measured on one yet.

Operands are the codes and scales of `ops/float8`. The sums are the tensor cores': another order than the emulation's,
in fewer bits, but the same for trainer and generator.

The library chooses a kernel by the number of rows, and another kernel may sum in another order. So rows are computed in
batches of a few sizes, padded with zeros, whose bits have been compared on the device when a shape is first used. Sizes
that disagree with the largest are not used. If a row's place in the largest batch changes its bits, or the library
refuses, the product and its gradients are those of the emulation. Gradients need no such care: they are sums over all
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.ops import cuda
from lockstep.ops.float8 import BLOCK, E4M3, SCALINGS, block_codes, float8_values, row_codes, tensor_codes

MULTIPLE = 16
"""Of the sizes of a product that the library computes."""
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of rows that are computed in one call."""
COMPARED = 4096
"""Different outputs of the products that are compared; with more outputs they repeat."""


class Codes(NamedTuple):
    codes: Tensor
    """`[rows, in]`, contiguous; products sum over `in`, a multiple of a block."""
    scales: Tensor
    """float32 without dimensions or `[rows, 1]`, or `float8_e8m0fnu` `[rows, in / 32]`."""

    @property
    def for_library(self) -> Tensor:
        """The scales as the library reads them: those of blocks in tiles of 128 rows and 4 blocks, each as 32 rows of
        four groups of 4 (cuBLAS, "1D block scaling factors layout")."""
        if self.scales.dtype != torch.float8_e8m0fnu:
            return self.scales
        bits = self.scales.view(torch.uint8)
        rows, blocks = bits.shape
        bits = F.pad(bits, (0, -blocks % 4, 0, -rows % 128))
        tiles = bits.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
        return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten().view(torch.float8_e8m0fnu)


Coding = Callable[[Tensor], Codes]
"""Codes of a matrix for products that sum over its last dimension."""


class Recipe(NamedTuple):
    """How operands are coded where `float8_products.Recipe` rounds them."""

    operand: Coding
    gradient: Coding
    weight_for_input: Coding
    capability: tuple[int, int] = (8, 9)
    """Of the oldest GPUs with instructions for it."""


def _by_row(x: Tensor) -> Codes:
    return Codes(*row_codes(x))


def _by_matrix(x: Tensor) -> Codes:
    codes, scale = row_codes(x, (-2, -1))
    return Codes(codes, scale.expand(x.shape[0], 1).contiguous())


def _by_tensor(dtype: torch.dtype) -> Coding:
    return lambda x: Codes(*tensor_codes(x, dtype))


def _by_blocks(scaling: str) -> Recipe:
    def coding(x: Tensor) -> Codes:
        return Codes(*block_codes(x, scaling))

    return Recipe(coding, coding, coding, capability=(10, 0))


_OPERAND, _GRADIENT = _by_tensor(torch.float8_e4m3fn), _by_tensor(torch.float8_e5m2)
RECIPES = {
    "tensorwise": Recipe(_OPERAND, _GRADIENT, _OPERAND),
    "rowwise": Recipe(_by_row, _by_row, _by_row),
    "rowwise_high_precision_weight_gradient": Recipe(_by_row, _by_row, _by_matrix),
    **{f"mxfp8_{scaling}": _by_blocks(scaling) for scaling in SCALINGS},
}


def usable(x: Tensor, weight: Tensor, kind: str, chunks: int) -> bool:
    """Whether this product is computed here. Decided by the weight's shape, not by the number of rows."""
    if x.dtype != torch.bfloat16 or not cuda.usable(x) or chunks > 1:
        return False
    if not x.shape[0] or x.shape[1] % MULTIPLE or weight.shape[0] % MULTIPLE:
        return False
    return capability(x.device) >= RECIPES[kind].capability and bool(batches(kind, x.device, *weight.shape))


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def product(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """`float8_linear` without gradient."""
    coding = RECIPES[kind].operand
    return _in_batches(x, _coded(weight, coding), coding, batches(kind, x.device, *weight.shape))


def input_gradient(grad: Tensor, weight: Tensor, kind: str) -> Tensor:
    recipe = RECIPES[kind]
    return _multiply(_coded(grad, recipe.gradient), _coded(weight.T, recipe.weight_for_input), grad.dtype)


def weight_gradient(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    recipe = RECIPES[kind]
    return _multiply(_coded(grad.T, recipe.gradient), _coded(x.T, recipe.operand), grad.dtype)


def _in_batches(x: Tensor, weight: Codes, coding: Coding, sizes: tuple[int, ...]) -> Tensor:
    """As few batches as there can be: of the largest size, and the rest in the smallest that holds it."""
    count, rest = divmod(x.shape[0], sizes[-1])
    parts = [sizes[-1]] * count + [next(size for size in sizes if size >= rest)] * bool(rest)
    left = _coded(_padded(x, sum(parts) - x.shape[0], 0), coding)
    scales = left.scales.split(parts) if left.scales.ndim else [left.scales] * len(parts)
    outs = [_multiply(Codes(*each), weight, x.dtype) for each in zip(left.codes.split(parts), scales)]
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[: x.shape[0]]


def _coded(x: Tensor, coding: Coding) -> Codes:
    """Of `x`, with zeros up to a whole block."""
    codes, scales = coding(_padded(x, 0, -x.shape[1] % BLOCK))
    return Codes(codes.contiguous(), scales.contiguous())


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x  # `pad` always copies


def _multiply(left: Codes, right: Codes, dtype: torch.dtype) -> Tensor:
    of_left, of_right = left.for_library, right.for_library
    of_right = of_right.T if of_right.ndim == 2 else of_right
    return torch._scaled_mm(left.codes, right.codes.T, of_left, of_right, out_dtype=dtype, use_fast_accum=False)


@cache
def batches(kind: str, device: torch.device, outputs: int, depth: int) -> tuple[int, ...]:
    """The sizes of batches in which a row has the same bits at any place; none if there is no such size."""
    from lockstep.ops.cuda.linear import cancelling

    generator = torch.Generator(device).manual_seed(depth * 1_000_003 + outputs)
    factors = cancelling(generator, BATCHES[0], depth, min(outputs, COMPARED))
    x, weight = map(_exact, factors)
    x, weight = x.repeat(BATCHES[-1] // len(x), 1), weight.repeat(-(-outputs // len(weight)), 1)[:outputs]
    coding = RECIPES[kind].operand
    right = _coded(weight, coding)
    try:
        with torch.no_grad():
            sums = {size: _multiply(_coded(x[:size], coding), right, x.dtype) for size in BATCHES}
    except (RuntimeError, ValueError):  # the library lacks this product
        return ()
    expected = sums[BATCHES[-1]][: BATCHES[0]]
    agree = [size for size, out in sums.items() if torch.equal(out, expected.repeat(size // BATCHES[0], 1))]
    return tuple(agree) if BATCHES[-1] in agree else ()


def _exact(x: Tensor) -> Tensor:
    """Numbers that stay the same in codes with a power of two as their scale, so that products still cancel: of few
    bits, none above 1.75 times a power of two (`floor` would saturate), and none too small beside the largest."""
    values = float8_values(x, torch.float8_e5m2).clamp_(-E4M3.largest, E4M3.largest)
    return values.masked_fill_(values.abs() < E4M3.largest * 2.0**-14, 0.0).bfloat16()
