"""Float8 codes and scales of a matrix in Triton, along its last dimension: those of `ops/float8`, in one or two reads.

Rounding and encoding are integer arithmetic and exact sums, so they are the same on every GPU. Not measured on one yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.float8 import ABOVE_448, BLOCK, SMALLEST_BLOCK_EXPONENT, SMALLEST_ROW_EXPONENT, TYPES, Float8Type

TILES = ((4, 1024), (64, 64))
"""A program's rows and columns: of a matrix whose rows are contiguous, and of others."""


@kernel
def _magnitudes(values):
    """As integers, which have the same order; NaN is the largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@kernel
def _exponents(largest, CARRY: tl.constexpr, SMALLEST: tl.constexpr):
    """Those of the scales for the bits of largest magnitudes, and the scales' inverses; NaN for a bad magnitude."""
    finite = largest < 0x7F800000
    exponent = tl.maximum(((tl.where(finite, largest, 0) + CARRY) >> 23) - 135, SMALLEST)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return exponent, tl.where(finite, inverse, float("nan"))


@kernel
def _encoded(values, MANTISSA: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr):
    """The codes of scaled values: of MANTISSA bits, with 2^LEAST as the smallest normal number."""
    broken = values != values
    size = tl.minimum(tl.abs(tl.where(broken, 0.0, values)), LARGEST)
    # Added to a number and subtracted again, it leaves as many bits as a code has, rounded to even.
    power = tl.maximum(_magnitudes(size) & 0x7F800000, (127 + LEAST) << 23).to(tl.float32, bitcast=True)
    step = power * (1.5 * 2.0 ** (23 - MANTISSA))
    rounded = (size + step) - step
    normal = (_magnitudes(rounded) >> (23 - MANTISSA)) - ((126 + LEAST) << MANTISSA)
    subnormal = (rounded * 2.0 ** (MANTISSA - LEAST)).to(tl.int32)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(rounded < 2.0**LEAST, subnormal, normal) | sign
    return tl.where(broken, 0x7F, code).to(tl.uint8)


@kernel(varying=("ROWS", "DEPTH"))
def _row_kernel(
    x, codes, scales, ROWS, DEPTH, ROW, INNER,
    CARRY: tl.constexpr, SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    largest = tl.zeros((BLOCK_M,), dtype=tl.int32)
    for start in range(0, DEPTH, BLOCK_K):
        column = (start + inner).to(tl.int64)
        mask = (row < ROWS)[:, None] & (column < DEPTH)[None, :]
        values = tl.load(x + row[:, None] * ROW + column[None, :] * INNER, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(_magnitudes(values), 1))
    exponent, inverse = _exponents(largest, CARRY, SMALLEST)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(scales + row, tl.where(inverse == inverse, scale, float("nan")), mask=row < ROWS)
    for start in range(0, DEPTH, BLOCK_K):
        column = (start + inner).to(tl.int64)
        mask = (row < ROWS)[:, None] & (column < DEPTH)[None, :]
        values = tl.load(x + row[:, None] * ROW + column[None, :] * INNER, mask=mask, other=0.0).to(tl.float32)
        code = _encoded(values * inverse[:, None], MANTISSA, LEAST, LARGEST)
        tl.store(codes + row[:, None] * DEPTH + column[None, :], code, mask=mask)


@kernel(varying=("ROWS", "DEPTH"))
def _tile_kernel(
    x, codes, scales, inverse, ROWS, DEPTH, ROW, INNER,
    CARRY: tl.constexpr, SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With the scale whose inverse is given, or one per block, whose bytes are written."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    mask = (row < ROWS)[:, None] & (column < DEPTH)[None, :]
    values = tl.load(x + row[:, None] * ROW + column[None, :] * INNER, mask=mask, other=0.0).to(tl.float32)
    if inverse is not None:
        values *= tl.load(inverse)
    else:
        blocks = tl.reshape(values, (BLOCK_M, BLOCK_K // BLOCK, BLOCK))
        exponent, powers = _exponents(tl.max(_magnitudes(blocks), 2), CARRY, SMALLEST)
        values = tl.reshape(blocks * powers[:, :, None], (BLOCK_M, BLOCK_K))
        block = tl.program_id(1) * (BLOCK_K // BLOCK) + tl.arange(0, BLOCK_K // BLOCK)
        scale = tl.where(powers == powers, exponent + 127, 255).to(tl.uint8)
        count = DEPTH // BLOCK
        inside = (row < ROWS)[:, None] & (block < count)[None, :]
        tl.store(scales + row[:, None] * count + block[None, :], scale, mask=inside)
    code = _encoded(values, MANTISSA, LEAST, LARGEST)
    tl.store(codes + row[:, None] * DEPTH + column[None, :], code, mask=mask)


def row_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """`float8.row_codes` of a matrix with any strides."""
    codes, scales = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    kind, sizes = TYPES[torch.float8_e4m3fn], _sizes(x)
    if x.numel():
        launch(
            _row_kernel, (triton.cdiv(x.shape[0], sizes["BLOCK_M"]),), x, codes, scales, *x.shape, *x.stride(),
            CARRY=ABOVE_448, SMALLEST=SMALLEST_ROW_EXPONENT, **_constants(kind), **sizes,
        )  # fmt: skip
    return codes.view(kind.dtype), scales


def block_codes(x: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """`float8.block_codes` of a matrix with any strides, whose rows are whole blocks."""
    scales = x.new_empty(x.shape[0], x.shape[1] // BLOCK, dtype=torch.uint8)
    codes = _in_tiles(x, TYPES[torch.float8_e4m3fn], scales, None, ABOVE_448 if scaling == "rceil" else 0)
    return codes, scales.view(torch.float8_e8m0fnu)


def scaled_codes(x: Tensor, inverse: Tensor, kind: Float8Type) -> Tensor:
    """The codes of a matrix with any strides times `inverse`, a number."""
    return _in_tiles(x, kind, None, inverse, 0)


def _in_tiles(x: Tensor, kind: Float8Type, scales: Tensor | None, inverse: Tensor | None, carry: int) -> Tensor:
    codes, sizes = x.new_empty(x.shape, dtype=torch.uint8), _sizes(x)
    grid = triton.cdiv(x.shape[0], sizes["BLOCK_M"]), triton.cdiv(x.shape[1], sizes["BLOCK_K"])
    if x.numel():
        launch(
            _tile_kernel, grid, x, codes, scales, inverse, *x.shape, *x.stride(), CARRY=carry,
            SMALLEST=SMALLEST_BLOCK_EXPONENT, **_constants(kind), **sizes, BLOCK=BLOCK,
        )  # fmt: skip
    return codes.view(kind.dtype)


def _constants(kind: Float8Type) -> dict[str, float]:
    return dict(MANTISSA=kind.mantissa, LEAST=kind.exponent, LARGEST=kind.largest, enable_fp_fusion=False)


def _sizes(x: Tensor) -> dict[str, int]:
    rows, columns = TILES[x.stride(1) != 1]
    return dict(BLOCK_M=rows, BLOCK_K=columns, num_warps=8)
