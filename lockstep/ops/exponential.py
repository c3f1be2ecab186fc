"""Elementwise exponential, logarithm and logistic function, rounded once from float64: the same bits on every CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import native
from lockstep.ops.elementary import exponential, logarithm, logistic, softplus


def exp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """e^x, with a gradient; exactly 1 at 0."""
    return _FromResult.apply(x, exponential, torch.exp, lambda out: out)


def log(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The natural logarithm, without a gradient."""
    return _apply(logarithm, torch.log, x.detach())


def sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1 / (1 + e^-x), with a gradient."""
    return _FromResult.apply(x, logistic, torch.sigmoid, lambda out: out * (1 - out))


def log_sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log(1 / (1 + e^-x)), with a gradient."""
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
