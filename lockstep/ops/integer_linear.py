"""Products of 8- and 4-bit integers, whose weights and rows are quantized at each call.

int8: a row of activations and an output's weights have one scale each, their largest magnitude / 127. An element is the
integer sum of the codes' products, rounded to float32, times the row's scale, times the output's.

int4: both are in groups along K with a scale per group. Weights have codes from -8 to 7, and the scale that maps the
number of the largest magnitude to -8, rounded to bfloat16; activations have 8 bits. An element is one float32 chain of
fused multiply-adds over the groups in ascending order: (integer sum · the weights' scale) · the row's scale. With
several chunks, each is a separate chain, and their sums are joined in a binary tree, as in `linear`.

Ranks that each have a part of K add their sums. In int8 a row's scale is then the maximum of its parts' scales, since
the division is monotonic.

Codes are rounded to nearest even. Integer sums are exact, so a row's bits depend neither on other rows nor on the
processor. A row or output with a number that is not finite gives NaN.

Gradients are those of the product of the rounded factors, as if rounding were the identity (a straight-through
estimator, arXiv 1308.3432).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Float32, Int32, Num
from torch import Tensor

from lockstep.ops import native, plain
from lockstep.ops.float8 import largest_magnitudes
from lockstep.ops.linear import gradient_chunks, input_gradient, token_weight_gradient, tree_sum
from lockstep.ops.opaque import Operator
from lockstep.ops.packed_weights import Layout, PackedWeight, integer_panels
from lockstep.ops.saved_outputs import saved_output


def layout_of(group: int) -> Layout:
    """How weights are packed: as 8-bit integers, or in groups of 4-bit ones."""
    return Layout(4, group) if group else Layout(8)


def int8_linear(
    x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"], chunks: int = 1
) -> Float[Tensor, "rows out"]:
    """`linear` with factors of 8-bit integers. `chunks` only concerns the gradient: integer sums have no order.

    Raises ValueError for factors that do not match.
    """
    return _integer_linear(x, weight, chunks, 0)


def int4_linear(
    x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"], chunks: int = 1, *, group: int
) -> Float[Tensor, "rows out"]:
    """`linear` with a weight of 4-bit integers, in groups of `group` numbers, a multiple of 16 that divides K.

    There are `chunks` chains, a power of two, or as many as can share the groups evenly.

    Raises ValueError for factors or a group that do not match.
    """
    return _integer_linear(x, weight, chunks, group)


def _integer_linear(x: Tensor, weight: Tensor, chunks: int, group: int) -> Tensor:
    if isinstance(weight, PackedWeight):
        out: Tensor = _PackedLinear.apply(x, weight, chunks, group)
        return out
    return _linear(x, weight, chunks, group)


def row_scales(x: Float[Tensor, "rows in"]) -> Float32[Tensor, "rows"]:
    """The scales of a row's 8-bit codes; NaN for a row that is not finite."""
    return _finite_or_nan(_scale_of(largest_magnitudes(x)))


def _scale_of(largest: Tensor) -> Tensor:
    return largest / largest.new_full((), 127.0)  # on a GPU, PyTorch multiplies by the inverse of a number


@torch.no_grad()
def int8_sums(
    x: Float[Tensor, "rows in"],
    weight: Float[Tensor, "outputs in"],
    of_rows: Float32[Tensor, "rows"],
    of_outputs: Float32[Tensor, "outputs"],
) -> Int32[Tensor, "rows outputs"]:
    """The integer sums of a product of which this is a part along K, with the scales of the whole rows and outputs."""
    _check(x, weight, 0)
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.int32)
    if x.is_meta or native.is_pretending():
        return out
    if not native.usable(x):
        codes, others = (quantized_rows(t, 0, scales)[0][:, 0] for t, scales in ((x, of_rows), (weight, of_outputs)))
        return _exact_sums(codes, others).int()
    x = x if x.stride(1) == 1 else x.contiguous()
    panels = integer_panels(weight, layout_of(0), of_outputs)
    native.call("int8_sums", x.dtype, x, x.stride(0), of_rows.contiguous(), panels, out, *x.shape, weight.shape[0])
    return out


@torch.no_grad()
def int4_sums(
    x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"], chunks: int = 1, *, group: int
) -> Float32[Tensor, "rows out"]:
    """The sums of `int4_linear` before they are rounded, for ranks that each have a part of K."""
    return _product(x, weight, chunks, group, torch.float32)


def rounded_rows(
    x: Float[Tensor, "rows in"], group: int = 0, scales: Float32[Tensor, "rows"] | None = None
) -> Float[Tensor, "rows in"]:
    """The numbers that 8-bit codes of `x` represent, in its dtype: per row, or per group of numbers.

    scales: of whole rows, if these are a part of them.
    """
    if not native.usable(x):
        codes, factors = quantized_rows(x, group, scales)
        return (codes * factors).to(x.dtype).view_as(x)
    x = x if x.stride(1) == 1 and not group else x.contiguous()
    width = group or x.shape[1]
    out = x.new_empty(x.shape)
    scales = None if scales is None else scales.contiguous()
    native.call("round_int8", x.dtype, x, group or x.stride(0), scales, out, x.numel() // max(width, 1), width)
    return out


def rounded_weight(
    weight: Float[Tensor, "*groups outputs in"], group: int = 0, scales: Float32[Tensor, "outputs"] | None = None
) -> Float[Tensor, "*groups outputs in"]:
    """The numbers that a weight's codes represent, in its dtype: 8-bit ones, or with a group 4-bit ones; for `scales`,
    see `rounded_rows`."""
    if isinstance(weight, PackedWeight):
        return weight.numbers()
    if not group:
        return rounded_rows(weight.flatten(0, -2), scales=scales).view_as(weight)
    if not native.usable(weight):
        codes, scales = quantized_weight(weight.flatten(0, -2), group)
        return (codes * scales).to(weight.dtype).view_as(weight)
    out = weight.new_empty(weight.shape)
    native.call("round_int4", weight.dtype, weight.contiguous(), out, weight.numel() // group, group)
    return out


def quantized_rows(
    x: Tensor, group: int = 0, scales: Float32[Tensor, "rows"] | None = None
) -> tuple[Float[Tensor, "rows groups group"], Tensor]:
    """8-bit codes as float32, and the scales `[rows, groups, 1]`: without groups they may be given."""
    parts = x.float().unflatten(1, (-1, group or x.shape[1]))
    scales = _scale_of(parts.abs().amax(-1, keepdim=True)) if scales is None else scales[:, None, None]
    return _codes(parts, scales, -127, 127), _finite_or_nan(scales)


def quantized_weight(weight: Tensor, group: int) -> tuple[Float[Tensor, "out groups group"], Tensor]:
    """4-bit codes as float32, and the scales `[out, groups, 1]`."""
    parts = weight.float().unflatten(1, (-1, group))
    most, least = parts.amax(-1, keepdim=True).clamp(min=0), parts.amin(-1, keepdim=True).clamp(max=0)
    scales = (torch.where(most > -least, most, least) / -8).bfloat16().float()
    return _codes(parts, scales, -8, 7), _finite_or_nan(scales)


def _codes(parts: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    codes = (parts / scales).round().clamp(least, most)
    return torch.where(scales.isfinite() & (scales != 0), codes, 0.0)


def _finite_or_nan(scales: Tensor) -> Tensor:
    return torch.where(scales.isfinite(), scales, torch.nan)


def _product(x: Tensor, weight: Tensor, chunks: int, group: int, dtype: torch.dtype | None = None) -> Tensor:
    """dtype: of the result, that of `x` or with a group float32."""
    _check(x, weight, group)
    dtype = dtype or x.dtype
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)
    if x.is_meta or native.is_pretending():
        return out
    chunks, layout = math.gcd(chunks, x.shape[1] // group) if group else 1, layout_of(group)
    if layout.on_gpu(weight) and chunks == 1 and dtype == x.dtype:
        from lockstep.ops.cuda import integer_linear

        return integer_linear.product(x, integer_panels(weight, layout), weight.shape[0], group)
    if not native.usable(x):
        return _plain_int4(x, weight, group, chunks).to(dtype) if group else _plain_int8(x, weight)
    x = x if x.stride(1) == 1 else x.contiguous()
    name = f"int{layout.bits}_{'product' if dtype == x.dtype else 'sums'}"
    sizes = (*x.shape, weight.shape[0], *((group, chunks) if group else ()))
    native.call(name, x.dtype, x, x.stride(0), integer_panels(weight, layout), out, *sizes)
    return out


def _check(x: Tensor, weight: Tensor, group: int) -> None:
    same_device = x.device == weight.device or isinstance(weight, PackedWeight)
    if x.shape[1] != weight.shape[1] or x.dtype != weight.dtype or not same_device:
        raise ValueError(
            f"a product needs factors of one width, dtype and device, but has {list(x.shape)} {x.dtype} on {x.device} "
            f"and {list(weight.shape)} {weight.dtype} on {weight.device}"
        )
    check_group_size(x, group)


def check_group_size(x: Tensor, group: int) -> None:
    if group % 16 or (group and x.shape[1] % group):
        raise ValueError(f"groups of {group} must be a multiple of 16, and divide the {x.shape[1]} features")


def _plain_int8(x: Tensor, weight: Tensor) -> Tensor:
    (codes, scales), (others, of_outputs) = quantized_rows(x), quantized_rows(weight)
    return scaled_sums(_exact_sums(codes[:, 0], others[:, 0]), scales[:, 0, 0], of_outputs[:, 0, 0]).to(x.dtype)


def scaled_sums(
    sums: Num[Tensor, "rows outputs"], of_rows: Float32[Tensor, "rows"], of_outputs: Float32[Tensor, "outputs"]
) -> Float32[Tensor, "rows outputs"]:
    """The elements of an int8 product, from its integer sums."""
    return sums.float() * of_rows[:, None] * of_outputs


def _exact_sums(codes: Tensor, others: Tensor) -> Tensor:
    """Integer sums as float64, which has all of them: exact in any order."""
    return codes.double() @ others.double().T


def _plain_int4(x: Tensor, weight: Tensor, group: int, chunks: int = 1) -> Tensor:
    """In float32."""
    (codes, scales), (others, of_outputs) = quantized_rows(x, group), quantized_weight(weight, group)
    totals = []
    for groups in torch.arange(codes.shape[1]).chunk(chunks):
        total = x.new_zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
        for g in groups.tolist():
            sums = _exact_sums(codes[:, g], others[:, g]).float()
            total = plain.multiply_add(sums * of_outputs[:, g].T, scales[:, g].expand_as(sums), total)
        totals.append(total)
    return tree_sum(totals)


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, chunks: int, group: int, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    parts = gradient_chunks(grad, chunks)
    grad_x = input_gradient(grad, rounded_weight(weight, group), parts) if needed[0] else None
    return grad_x, token_weight_gradient(grad, rounded_rows(x, group)) if needed[1] else None


_linear = Operator(
    "integer_linear(Tensor x, Tensor weight, int chunks, int group) -> Tensor",
    _product,
    fake=lambda x, weight, chunks, group: x.new_empty(x.shape[0], weight.shape[0]),
    gradients=_gradients,
    kind="linear",
)


class _PackedLinear(torch.autograd.Function):
    """With a packed weight, which has no gradient: nothing needs to be saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight, chunks: int, group: int) -> Tensor:
        ctx.weight, ctx.chunks, ctx.group = weight, chunks, group
        return saved_output("linear", lambda: _product(x, weight, chunks, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradient_chunks(grads[0], ctx.chunks)
        return input_gradient(grads[0], rounded_weight(ctx.weight, ctx.group), parts), None, None, None
