"""Keys and values of the cache in 8-bit integers: the same numbers for trainer and generator.

The row of a token and key-value head has one scale, a power of two: the smallest with which no magnitude exceeds 127. A
code times the scale is exact in float32 and bfloat16, and the largest code is at least 64; so rounding is idempotent,
and a rounded row determines its codes. The model rounds keys and values (`cache_rounded`): the trainer attends to them
as they are, and the generator's pages store their codes. So both multiply the same numbers.

A row with a number that is not finite, or beyond 127 · 2^121, is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import native
from lockstep.ops.opaque import empty_like, library

CODES = torch.int8
"""The dtype of pages that store codes."""
SCALES = 2
"""Bytes per token in a page of keys: the scales of the key and of its value, each the exponent's byte of a float32."""
NOT_A_NUMBER = 255
"""Its scale is infinite: times a code of 0, NaN."""
_MOST = 127 * 2.0**121


def cache_rounded(x: Float[Tensor, "tokens heads head_dim"]) -> Float[Tensor, "tokens heads head_dim"]:
    """The numbers that the cache's codes of `x` represent, in its dtype.

    The gradient is that of the identity: a straight-through estimator (arXiv 1308.3432).
    """
    if torch.compiler.is_compiling():
        out: Tensor = _opaque(x)
        return out
    if torch.is_grad_enabled() and x.requires_grad:
        return _StraightThrough.apply(x)
    return _rounded(x)


def codes_of(
    x: Float[Tensor, "*rows head_dim"],
) -> tuple[Int[Tensor, "*rows head_dim"], Int[Tensor, "*rows 1"]]:
    """The int8 codes of rows, and the exponents of their scales as int32."""
    x = x.float()
    bits = x.abs().view(torch.int32).amax(-1, keepdim=True)  # ordered like the magnitudes; of NaN above all
    # 127 is 2^6 times a fraction of 0x7e0000: a larger one needs the next power of two. At least that of the smallest
    # normal number, since a scale is never denormal.
    exponents = (((bits + 0x1FFFF) >> 23) - 6).clamp(min=1)
    broken = ~(bits.view(torch.float32) <= _MOST)
    codes = (x * scales_of(254 - exponents)).round()
    return torch.where(broken, 0.0, codes).to(CODES), torch.where(broken, NOT_A_NUMBER, exponents)


def scales_of(exponents: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Scales by the bytes of their exponents."""
    return (exponents.int() << 23).view(torch.float32)


def widened_keys(keys: Int[Tensor, "*pages rows page"]) -> Float[Tensor, "*pages head_dim page"]:
    """The numbers of pages of keys, float32."""
    return keys[..., :-SCALES, :].float() * scales_of(keys[..., -2:-1, :].view(torch.uint8))


def widened_values(
    keys: Int[Tensor, "*pages rows page"], values: Int[Tensor, "*pages page head_dim"]
) -> Float[Tensor, "*pages page head_dim"]:
    """The numbers of pages of values, float32; their scales are in the pages of keys."""
    return values.float() * scales_of(keys[..., -1, :, None].view(torch.uint8))


def write_codes(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """`write_pages_reference` of rounded rows, into pages of codes."""
    (key_codes, key_scales), (value_codes, value_scales) = codes_of(k), codes_of(v)
    broken = value_scales == NOT_A_NUMBER
    key_codes, key_scales = key_codes.masked_fill(broken, 0), key_scales.masked_fill(broken, NOT_A_NUMBER)
    scales = torch.cat((key_scales, value_scales.masked_fill(broken, 0)), -1).to(torch.uint8).view(CODES)
    page, offset = slots // keys.shape[3], slots % keys.shape[3]
    keys[page, :, :, offset] = torch.cat((key_codes, scales), -1)
    values[page, :, offset] = value_codes


def _rounded(x: Tensor) -> Tensor:
    if x.is_meta or native.is_pretending():
        return empty_like(x)
    if not native.usable(x):
        codes, exponents = codes_of(x)
        return (codes.float() * scales_of(exponents)).to(x.dtype)
    x = x.contiguous()
    out = torch.empty_like(x)
    native.call("round_cached", x.dtype, x, out, x.shape[0] * x.shape[1], x.shape[2])
    return out


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _rounded(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@library.operator("cache_rounded(Tensor x) -> Tensor", fake=empty_like)
def _opaque(x: Tensor) -> Tensor:
    return _rounded(x)


library.differentiable("cache_rounded", save=lambda ctx, inputs, output: None, backward=lambda ctx, grad: grad)
