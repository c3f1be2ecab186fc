"""Rounding to float8: with one scale per tensor or per row, or in MX blocks of 32 with power-of-two scales.

Results are float8 values held in the dtype of the input, since PyTorch's casts from float8 take longer than the rest of
a rounding. Every step is exact or a maximum, except the one rounding, so they have the same bits on every device, and a
row or block depends on nothing else. A row or block with an infinity or NaN is NaN everywhere. Nothing has a gradient.

Sources: Open Compute Project, "8-bit Floating Point Specification" (2023) and "OCP Microscaling Formats Specification"
(2023); scales as torchao 0.18 defines them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from lockstep.ops import cuda, native


class Float8Type(NamedTuple):
    dtype: torch.dtype
    mantissa: int
    """Bits after the leading one."""
    exponent: int
    """Of the smallest normal number."""
    largest: float


E4M3 = Float8Type(torch.float8_e4m3fn, 3, -6, 448.0)
E5M2 = Float8Type(torch.float8_e5m2, 2, -14, 57344.0)
TYPES = {each.dtype: each for each in (E4M3, E5M2)}
BLOCK = 32
"""Numbers per MX scale."""
SCALINGS = ("floor", "rceil")


class _Layout(NamedTuple):
    """Of the dtype that holds the values."""

    integer: torch.dtype
    mantissa: int
    infinity: int
    """Its bits, which are also the exponent's."""


_LAYOUTS = {
    torch.float32: _Layout(torch.int32, 23, 0x7F800000),
    torch.bfloat16: _Layout(torch.int16, 7, 0x7F80),
}
SMALLEST_ROW_EXPONENT = -48
"""Of a row's scale, for rows with magnitudes up to 1e-12 (torchao's `EPS`)."""
SMALLEST_BLOCK_EXPONENT = -127
"""Of e8m0."""
ABOVE_448 = 0x1FFFFF
"""Added to a float32's bits, it carries into the exponent if the mantissa exceeds that of 448, 1.75."""


@torch.no_grad()
def float8_values(x: Float[Tensor, "*shape"], dtype: torch.dtype = torch.float8_e4m3fn) -> Float[Tensor, "*shape"]:
    """`x` rounded to the nearest value of a float8 type, ties to even, in the dtype of `x`: float32 or bfloat16.

    Finite numbers beyond the largest value become that value; infinities become NaN.
    """
    target = TYPES[dtype]
    values = _round_(x.clamp(-target.largest, target.largest), target).copysign(x)
    return values.masked_fill_(x.isinf(), torch.nan)


@torch.no_grad()
def row_values(x: Float[Tensor, "*shape"], dim: int | tuple[int, ...] = -1) -> Float[Tensor, "*shape"]:
    """`x` rounded to e4m3 times a power of two per row along `dim`, or per part with these dimensions, in its dtype.

    That power is the smallest with which the row's largest magnitude does not exceed 448, and at least 2^-48: torchao's
    `rowwise` recipes, which round 448 / magnitude down to a power of two. A row with a magnitude of 248 · 2^120 or more
    may round to infinity.
    """
    if native.usable(x):
        return _native_values(x, dim, None, "rceil", SMALLEST_ROW_EXPONENT)
    return scaled_values(x, row_scales(x, dim))


@torch.no_grad()
def row_scales(x: Float[Tensor, "*shape"], dim: int | tuple[int, ...] = -1) -> Float32[Tensor, "..."]:
    """The powers of two of `row_values`, with length 1 along `dim`; NaN for a row that is not finite.

    For rows of which each rank has a part: `row_values` are the `scaled_values` at the maximum of the parts' scales.
    """
    return _power_scales(_largest_bits(x, dim), "rceil", SMALLEST_ROW_EXPONENT)


@torch.no_grad()
def largest_magnitudes(x: Float[Tensor, "*rows in"]) -> Float32[Tensor, "*rows"]:
    """Of each row; not finite if one of its numbers is not."""
    return _float32_bits(_largest_bits(x, -1)).view(torch.float32).squeeze(-1)


@torch.no_grad()
def scaled_values(
    x: Float[Tensor, "*shape"], scales: Float32[Tensor, "..."], saturate: bool = False
) -> Float[Tensor, "*shape"]:
    """`x` rounded to e4m3 times powers of two that are given, in its dtype.

    saturate: magnitudes above 448 times their scale become 448 times it; without it, there must be none.
    """
    values = _round_(x * scales.reciprocal().to(x.dtype), E4M3)
    if saturate:
        values.clamp_(-E4M3.largest, E4M3.largest)
    return values.mul_(scales.to(x.dtype))


@torch.no_grad()
def block_values(x: Float[Tensor, "*shape"], scaling: str = "rceil", dim: int = -1) -> Float[Tensor, "*shape"]:
    """`x` rounded to e4m3 times a power of two per block of 32 along `dim`, in its dtype. A last block may be shorter.

    scaling: `floor`: 2^(floor(log2(largest magnitude)) - 8), as the MX specification suggests; magnitudes above 448
    times that become 448 times it. `rceil`: the smallest power of two with which none does. Both at least 2^-127.

    In bfloat16, a block whose largest magnitude is below 2^-116 is rounded again, to its subnormal numbers. With
    `rceil`, magnitudes of 248 · 2^120 or more may round to infinity. Raises ValueError for another scaling.
    """
    _check_scaling(scaling)
    if native.usable(x):
        return _native_values(x, dim, BLOCK, scaling, SMALLEST_BLOCK_EXPONENT)
    blocks = _in_blocks(x, dim)
    values = scaled_values(blocks, _block_scales(blocks, scaling, dim), saturate=scaling == "floor")
    first = dim if dim >= 0 else dim - 1
    return values.flatten(first, first + 1).narrow(dim, 0, x.shape[dim])


@torch.no_grad()
def tensor_values(
    x: Float[Tensor, "*shape"], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Float[Tensor, "*shape"], Float32[Tensor, ""]]:
    """`x` rounded to float8 values times a scale, and this scale. The values depend on all of `x`.

    The inverse of the scale takes the largest magnitude of `x`, or 1e-12 if that is smaller, to the type's.
    """
    inverse = _tensor_inverse(x, dtype)
    if native.usable(x):
        x = x.contiguous()
        values = torch.empty_like(x)
        native.call("round_scaled", x.dtype, x, inverse, values, x.numel(), int(dtype == torch.float8_e5m2))
    else:
        values = _round_(x.float() * inverse, TYPES[dtype]).to(x.dtype)
    return values, inverse.reciprocal()


@torch.no_grad()
def row_codes(x: Float[Tensor, "*shape"], dim: int | tuple[int, ...] = -1) -> tuple[Tensor, Float32[Tensor, "..."]]:
    """`row_values` as `float8_e4m3fn` codes of its shape, and the scales, with length 1 along `dim`."""
    if _by_kernel(x) and dim == -1:
        from lockstep.ops.cuda import float8

        return float8.row_codes(x)
    scales = row_scales(x, dim)
    return _codes(x, scales.reciprocal(), E4M3), scales


@torch.no_grad()
def block_codes(x: Float[Tensor, "*rows in"], scaling: str = "rceil") -> tuple[Tensor, Tensor]:
    """`block_values` as `float8_e4m3fn` codes `[*rows, in]` and `float8_e8m0fnu` scales `[*rows, in / 32]`.

    Raises ValueError for another scaling, and if `in` is no multiple of 32.
    """
    _check_scaling(scaling)
    if x.shape[-1] % BLOCK:
        raise ValueError(f"MX codes are in blocks of {BLOCK}, but the rows have {x.shape[-1]} numbers")
    if _by_kernel(x):
        from lockstep.ops.cuda import float8

        return float8.block_codes(x, scaling)
    blocks = _in_blocks(x, -1)
    scales = _block_scales(blocks, scaling, -1)
    codes = _codes(blocks, scales.reciprocal(), E4M3).flatten(-2)
    return codes, (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu).squeeze(-1)


@torch.no_grad()
def tensor_codes(
    x: Float[Tensor, "*shape"], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Float32[Tensor, ""]]:
    """`tensor_values` as float8 codes, and the scale."""
    inverse = _tensor_inverse(x, dtype)
    return _codes(x, inverse, TYPES[dtype]), inverse.reciprocal()


def _check_scaling(scaling: str) -> None:
    if scaling not in SCALINGS:
        raise ValueError(f'MX scaling is "{scaling}"; it can be {" or ".join(SCALINGS)}')


def _by_kernel(x: Tensor) -> bool:
    return x.dim() == 2 and cuda.usable(x)


def _codes(x: Tensor, inverse: Tensor, target: Float8Type) -> Tensor:
    if _by_kernel(x) and inverse.numel() == 1:
        from lockstep.ops.cuda import float8

        return float8.scaled_codes(x, inverse, target)
    return float8_values(x.float() * inverse, target.dtype).to(target.dtype)


def _round_(x: Tensor, target: Float8Type) -> Tensor:
    """Rounds in place to the nearest value of a float8 type, magnitudes below 2^100 as if it had no largest value.

    Adding 1.5 · 2^b times its power of two to a number leaves as many bits of it as float8 has; the addition rounds to
    even. Below float8's normal numbers, the power is that of the smallest.
    """
    layout = _LAYOUTS[x.dtype]
    smallest = (127 + target.exponent) << layout.mantissa
    powers = (x.view(layout.integer) & layout.infinity).clamp_min_(smallest).view(x.dtype)
    factor = 1.5 * 2 ** (layout.mantissa - target.mantissa)
    return x.add_(powers, alpha=factor).sub_(powers, alpha=factor)


def _native_values(x: Tensor, dim: int | tuple[int, ...], block: int | None, scaling: str, smallest: int) -> Tensor:
    """`row_values`, or with `block` `block_values`, in one call and one read of the tensor instead of ten."""
    x = x.contiguous()
    dims = sorted(each % x.dim() for each in ((dim,) if isinstance(dim, int) else dim))
    outer, length, inner = (
        part.numel() for part in (x.shape[: dims[0]], x.shape[dims[0] : dims[-1] + 1], x.shape[dims[-1] + 1 :])
    )
    out = torch.empty_like(x)
    sizes = (outer, length, inner, block or max(length, 1), smallest, int(scaling == "floor"))
    native.call("round_e4m3", x.dtype, x, out, *sizes)
    return out


def _block_scales(blocks: Tensor, scaling: str, dim: int) -> Tensor:
    inside = dim if dim < 0 else dim + 1
    return _power_scales(_largest_bits(blocks, inside), scaling, SMALLEST_BLOCK_EXPONENT)


def _tensor_inverse(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = _float32_bits(_largest_bits(x, tuple(range(x.dim())))).squeeze().view(torch.float32).double()
    inverse = (TYPES[dtype].largest / largest.clamp_min(1e-12)).float()
    return inverse.masked_fill_(largest.isinf(), torch.nan)


def _largest_bits(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The bits of the largest magnitude along `dim`, which is kept with length 1. As integers, magnitudes have the same
    order, NaN above infinity, and maxima take a tenth of the time."""
    layout = _LAYOUTS[x.dtype]
    bits = x.view(layout.integer) & torch.iinfo(layout.integer).max
    return bits.amax(dim, keepdim=True) if bits.numel() else bits.sum(dim, keepdim=True, dtype=bits.dtype)


def _float32_bits(bits: Tensor) -> Tensor:
    return bits.int() << 16 if bits.dtype == torch.int16 else bits


def _power_scales(bits: Tensor, scaling: str, smallest: int) -> Tensor:
    """2^e for magnitudes given by their bits; NaN for those that are not finite."""
    bits = _float32_bits(bits)
    not_finite = bits >= _LAYOUTS[torch.float32].infinity
    carry = ABOVE_448 if scaling == "rceil" else 0
    exponents = ((bits.masked_fill(not_finite, 0) + carry) >> 23) - 127 - 8
    powers = ((127 - exponents.clamp_min_(smallest)) << 23).view(torch.float32).reciprocal()
    return powers.masked_fill_(not_finite, torch.nan)


def _in_blocks(x: Tensor, dim: int) -> Tensor:
    """`dim` as `[blocks, 32]`, the last one filled with zeros."""
    if missing := -x.shape[dim] % BLOCK:
        after = x.dim() - 1 - dim % x.dim()
        x = torch.nn.functional.pad(x, (0, 0) * after + (0, missing))
    return x.unflatten(dim, (x.shape[dim] // BLOCK, BLOCK))
