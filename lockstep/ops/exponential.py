"""Elementwise exponential and logarithm, rounded once from float64: the same bits on every CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import native
from lockstep.ops.elementary import exponential, logarithm


def exp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """e^x, with a gradient; exactly 1 at 0."""
    return _Exp.apply(x)


def log(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The natural logarithm, without a gradient."""
    return _apply(logarithm, torch.log, x.detach())


def _apply(ours: Callable[[np.ndarray], np.ndarray], devices: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.device.type != "cpu" or native.is_pretending():
        return devices(x)
    return torch.from_numpy(ours(x.detach().double().numpy())).to(x.dtype)


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
