"""The operators' Triton forms for NVIDIA GPUs. Modules are imported on use, so triton is only needed then.

Kernels, and the functions that they call, have a parameter per pointer, stride and compile-time constant.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def usable(x: Tensor) -> bool:
    """Whether it is on an NVIDIA GPU, of a floating type, with triton installed and LOCKSTEP_NATIVE not 0."""
    return x.is_cuda and x.dtype in DTYPES and INSTALLED


def _installed() -> bool:
    if os.environ.get("LOCKSTEP_NATIVE", "1") == "0" or torch.version.hip is not None:
        return False
    return importlib.util.find_spec("triton") is not None


INSTALLED = _installed()
"""Looked up once, at import: `torch.compile` could not trace the lookup."""
