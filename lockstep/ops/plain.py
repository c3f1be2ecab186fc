"""Arithmetic of the plain forms: elementwise PyTorch operations in a fixed order.

With more rows or threads, a library may sum a row in another order, or compute the last elements of a tensor by another
code path. Operations written out element by element cannot differ. They are slow; they define the products' bits.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c of float32 tensors with one rounding, like the processor's fused instruction.

    The product is exact in float64. The sum is rounded to odd there, so that rounding it to float32 rounds the exact
    value (Boldo & Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)
    inexact = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    return (bits + torch.where(away, 1, -1) * inexact).view(torch.float64).float()


def product(
    x: Float[Tensor, "*batch rows inner"], w: Float[Tensor, "*batch inner columns"], fused: bool = True
) -> Tensor:
    """`x @ w` in float32, `[*batch, rows, columns]`: each element one chain over ascending `inner`.

    With `fused`, of `multiply_add`, which gives the bits of the compiled kernels; without it, six times as fast.
    """
    x, w = x.float(), w.float()
    out = torch.zeros(*x.shape[:-1], w.shape[-1], dtype=torch.float32, device=x.device)
    for k in range(x.shape[-1]):
        left, right = x[..., :, k, None], w[..., None, k, :]
        out = multiply_add(left, right, out) if fused else out + left * right
    return out


def row_sum(x: Float[Tensor, "*rows columns"]) -> Float[Tensor, "*rows"]:
    """The sum of each row, adding its halves until one element is left."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        x = x[..., :half] + torch.nn.functional.pad(x[..., half:], (0, 2 * half - x.shape[-1]))
    return x[..., 0]


def exp(x: Tensor) -> Tensor:
    """e^x of float32 within two units in the last place (Cephes); exactly 0 below -87, exactly 1 at 0."""
    clamped = x.clamp(-87.0, 88.0)
    k = torch.round(clamped * 1.44269504088896341)
    r = clamped - k * 0.693359375
    r = r - k * -2.12194440e-4
    y = torch.full_like(r, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r
        y = y + coefficient
    y = y * (r * r)
    y = (y + r) + 1.0
    power = ((torch.nan_to_num(k).to(torch.int32) + 127) << 23).view(torch.float32)
    y = torch.where(x < -87.0, 0.0, y * power)
    return torch.where(x.isnan(), x, y)


def log(x: Tensor) -> Tensor:
    """ln x of positive float32 within two units in the last place (Cephes); -inf at 0, NaN below it."""
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32) - 1.0
    e, z = exponent.float(), mantissa * mantissa
    y = torch.full_like(mantissa, 7.0376836292e-2)
    for coefficient in (
        -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
        -2.4999993993e-1, 3.3333331174e-1,
    ):  # fmt: skip
        y = y * mantissa
        y = y + coefficient
    y = (mantissa * z) * y
    y = y + e * -2.12194440e-4
    y = y - 0.5 * z
    y = (mantissa + y) + e * 0.693359375
    y = torch.where(x == 0, float("-inf"), torch.where(x < 0, float("nan"), y))
    return torch.where(x.isnan() | (x == float("inf")), x, y)
