"""The operators' fast CPU forms: C++ compiled at first use, called through ctypes.

Where no compiler is, or with LOCKSTEP_NATIVE=0, the plain PyTorch forms serve: slower, and with their own bits,
but trainer and generator use the same form, so they agree either way.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lockstep.ops.native.build import CompilerMissing, build

SUFFIX = {torch.float32: "_f32", torch.bfloat16: "_bf16"}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they are switched off or cannot be compiled (with a warning)."""
    if os.environ.get("LOCKSTEP_NATIVE", "1") == "0":
        return None
    try:
        return ctypes.CDLL(str(build()))
    except CompilerMissing as reason:
        warnings.warn(f"the plain PyTorch operators are used, which are slower: {reason}", stacklevel=2)
        return None


def usable(x: Tensor) -> bool:
    """Whether the compiled kernels serve this tensor: on the CPU, float32 or bfloat16, and compiled at all."""
    return x.device.type == "cpu" and x.dtype in SUFFIX and (_pretending or library() is not None)


def call(name: str, dtype: torch.dtype, *arguments: Tensor | int | float) -> None:
    """Calls `name` for this dtype: tensors (contiguous) pass their address, integers as int64, floats as float."""
    if _pretending:
        return
    bound = _functions.get((name, dtype)) or _bind(name, dtype, arguments)
    bound(*[a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])


@contextmanager
def pretending() -> Iterator[None]:
    """Within it operators allocate and save what they would, and compute nothing: for tensors without values."""
    global _pretending
    _pretending = True
    try:
        yield
    finally:
        _pretending = False


def is_pretending() -> bool:
    return _pretending


def function(name: str) -> Any:
    """A function of the compiled kernels; it returns an int unless bound otherwise."""
    compiled = library()
    if compiled is None:
        raise RuntimeError(f"{name} was called, but the native operators are not available")
    return getattr(compiled, name)


_pretending = False
_functions: dict[tuple[str, torch.dtype], Any] = {}
_C_TYPES = {int: ctypes.c_int64, float: ctypes.c_float}


def _bind(name: str, dtype: torch.dtype, arguments: tuple[Tensor | int | float, ...]) -> Any:
    bound = function(name + SUFFIX[dtype])
    bound.argtypes = [_C_TYPES.get(type(a), ctypes.c_void_p) for a in arguments]
    bound.restype = None
    _functions[name, dtype] = bound
    return bound
