"""Whether the Triton forms serve a tensor, and how their launches are made known to `torch.compile`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def usable(x: Tensor) -> bool:
    """On an NVIDIA GPU, in a floating type, with triton installed and LOCKSTEP_NATIVE not 0."""
    return x.is_cuda and x.dtype in DTYPES and INSTALLED


def _installed() -> bool:
    if os.environ.get("LOCKSTEP_NATIVE", "1") == "0" or torch.version.hip is not None:
        return False
    return importlib.util.find_spec("triton") is not None


INSTALLED = _installed()
"""Looked up once, at import: `torch.compile` could not trace the looking."""


_library = torch.library.Library("lockstep_triton", "DEF")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a launching function as an operator, so that a compiled graph calls it as a whole.

    `fake` makes empty results of the right shapes. On the CPU the operator serves Triton's interpreter. A raw
    registration costs a few microseconds a call; `torch.library.custom_op` several times that.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema)
        _library.impl(name, function, "CUDA")
        _library.impl(name, function, "CPU")
        torch.library.register_fake(f"lockstep_triton::{name}", fake, lib=_library)
        overload: Callable[..., Any] = getattr(torch.ops.lockstep_triton, name).default
        return overload

    return register


def differentiable(name: str, save: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Gives an operator its gradient: `save(ctx, inputs, output)` after forward, `backward(ctx, *grads)`.

    On the operator itself and not in an `autograd.Function`, which `torch.compile` would look into.
    """
    torch.library.register_autograd(f"lockstep_triton::{name}", backward, setup_context=save, lib=_library)
