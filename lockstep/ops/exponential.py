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
    return _Exp.apply(x)


def log(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The natural logarithm, without a gradient."""
    return _apply(logarithm, torch.log, x.detach())


def sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1 / (1 + e^-x), with a gradient."""
    return _Sigmoid.apply(x)


def log_sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log(1 / (1 + e^-x)), with a gradient."""
    return _LogSigmoid.apply(x)


def _apply(ours: Callable[[np.ndarray], np.ndarray], devices: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.device.type != "cpu" or native.is_pretending():
        return devices(x)
    # As an array: NumPy makes a number of one without dimensions.
    return torch.from_numpy(np.asarray(ours(x.detach().double().numpy()))).to(x.dtype)


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = _apply(exponential, torch.exp, x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grads[0] * out


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = _apply(logistic, torch.sigmoid, x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grads[0] * (out * (1 - out))


class _LogSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _apply(lambda wide: -softplus(-wide), F.logsigmoid, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * sigmoid(-x)
