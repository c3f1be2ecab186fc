"""Elementary functions in float64, using only additions, multiplications and divisions; four also as operators.

IEEE 754 fixes the result of each of those, so these functions have the same bits on every processor. A library's differ
between instruction sets and versions. NumPy runs every operation separately: nothing fuses a product with a sum.
Reductions and polynomials are those of fdlibm (Sun Microsystems, 1993), accurate to about 1 ulp of float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor

from lockstep.ops import native

LN2_HIGH, LN2_LOW = map(float.fromhex, ("0x1.62e42fee00000p-1", "0x1.a39ef35793c76p-33"))
LOG2_E = float.fromhex("0x1.71547652b82fep+0")
# π/2 in three parts; the first two have 30 bits, so that their products with a number of quarter turns are exact.
HALF_PI = tuple(map(float.fromhex, ("0x1.921fb54000000p+0", "0x1.10b4611800000p-30", "0x1.313198a2e0370p-61")))
LARGEST_ANGLE = 1e7
"""In radians: up to this angle, and up to 2²³ quarter turns, the reduction of an angle is exact."""

SINE = (
    -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04,
    2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10,
)  # fmt: skip
COSINE = (
    4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05,
    -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11,
)  # fmt: skip
EXPONENTIAL = (
    1.66666666666666019037e-01, -2.77777777770155933842e-03, 6.61375632143793436117e-05,
    -1.65339022054652515390e-06, 4.13813679705723846039e-08,
)  # fmt: skip
LOGARITHM = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
    1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
)  # fmt: skip

Array = np.ndarray


def cosine_and_sine(
    angles: Float64[Array, "*shape"],
) -> tuple[Float64[Array, "*shape"], Float64[Array, "*shape"]]:
    """For angles in radians, accurate to the last digits up to `LARGEST_ANGLE`, and less exact beyond."""
    turns = np.rint(angles * (2 / math.pi))
    rest = ((angles - turns * HALF_PI[0]) - turns * HALF_PI[1]) - turns * HALF_PI[2]
    square = rest * rest
    sine = rest + rest * square * polynomial(square, SINE)
    cosine = (1.0 - 0.5 * square) + square * square * polynomial(square, COSINE)
    quarter = turns.astype(np.int64) & 3
    odd = (quarter & 1).astype(bool)
    return (
        np.where(odd, sine, cosine) * np.where((quarter == 1) | (quarter == 2), -1.0, 1.0),
        np.where(odd, cosine, sine) * np.where(quarter >= 2, -1.0, 1.0),
    )


def cosine(angle: float) -> float:
    """The cosine of one angle."""
    return float(cosine_and_sine(np.array([angle]))[0][0])


def exponential(x: Float64[Array, "*shape"]) -> Float64[Array, "*shape"]:
    """e^x: exactly 1 at 0; 0 or infinity outside of float64's range."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        bounded = np.clip(x, -746.0, 710.0)  # NaN is preserved
        powers = np.rint(bounded * LOG2_E)
        high, low = bounded - powers * LN2_HIGH, powers * LN2_LOW
        rest = high - low
        square = rest * rest
        c = rest - square * polynomial(square, EXPONENTIAL)
        y = 1.0 - ((low - (rest * c) / (2.0 - c)) - high)
        return np.ldexp(y, powers.astype(np.int32))


def logarithm(x: Float64[Array, "*shape"]) -> Float64[Array, "*shape"]:
    """The natural logarithm; minus infinity at 0, NaN below."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mantissas, powers = np.frexp(x)
        small = mantissas < math.sqrt(0.5)
        f = np.where(small, 2.0 * mantissas, mantissas) - 1.0
        k = powers - small.astype(np.float64)
        s = f / (2.0 + f)
        square = s * s
        half = 0.5 * f * f
        rest = s * (half + square * polynomial(square, LOGARITHM))
        result = k * LN2_HIGH - ((half - (rest + k * LN2_LOW)) - f)
        result = np.where(np.isinf(x), np.inf, np.where(x == 0, -np.inf, result))
        return np.where((x < 0) | np.isnan(x), np.nan, result)


def logistic(x: Float64[Array, "*shape"]) -> Float64[Array, "*shape"]:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + exponential(-x))


def softplus(x: Float64[Array, "*shape"]) -> Float64[Array, "*shape"]:
    """log(1 + e^x), accurate also where e^x is negligible next to 1 (Goldberg 1991, theorem 4)."""
    small = exponential(-np.abs(x))
    sum_ = 1.0 + small
    with np.errstate(invalid="ignore", divide="ignore"):
        rest = np.where(sum_ == 1.0, small, logarithm(sum_) * (small / (sum_ - 1.0)))
    return np.maximum(x, 0.0) + rest


def power(base: float, exponent: int) -> float:
    """`base ** exponent` for a whole exponent of 0 or more, by squaring."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    """By Horner's scheme, in the dtype of `x`; the coefficients are those of ascending powers."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result *= x
        result += coefficient
    return result


def exp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """e^x rounded once from float64, with a gradient; exactly 1 at 0."""
    return _FromResult.apply(x, exponential, torch.exp, lambda out: out)


def log(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The natural logarithm rounded once from float64, without a gradient."""
    return _apply(logarithm, torch.log, x.detach())


def sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1 / (1 + e^-x) rounded once from float64, with a gradient."""
    return _FromResult.apply(x, logistic, torch.sigmoid, lambda out: out * (1 - out))


def log_sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log(1 / (1 + e^-x)) rounded once from float64, with a gradient."""
    return _LogSigmoid.apply(x)


def _apply(on_cpu: Callable[[np.ndarray], np.ndarray], devices: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.device.type != "cpu" or native.is_pretending():
        return devices(x)
    # `asarray`, since NumPy returns a scalar for an array without dimensions.
    return torch.from_numpy(np.asarray(on_cpu(x.detach().double().numpy()))).to(x.dtype)


class _FromResult(torch.autograd.Function):
    """A function whose derivative, `slope`, is computed from its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_cpu: Any, devices: Any, slope: Callable[[Tensor], Tensor]) -> Tensor:
        out = _apply(on_cpu, devices, x)
        ctx.save_for_backward(out)
        ctx.slope = slope
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (out,) = ctx.saved_tensors
        return grads[0] * ctx.slope(out), None, None, None


class _LogSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _apply(lambda wide: -softplus(-wide), F.logsigmoid, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * sigmoid(-x)
