"""Calls each of MKL's vector functions once while there is only one thread.

MKL selects a function's kernel at the first call. If two threads make that call at once, one of them may run a
low-accuracy kernel: wrong by up to 1.5e-4, once per process (pytorch/pytorch#188792). No forward pass calls such a
function, but optimizers and user code do.
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1",
    "lgamma", "log", "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip


def call_once() -> None:
    """Calls each on one element, in float32 and float64."""
    for dtype in (torch.float32, torch.float64):
        x = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(x)
        torch.pow(x, x)
        torch.atan2(x, x)
