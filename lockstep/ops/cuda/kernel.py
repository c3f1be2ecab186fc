"""Definition and launch of Triton kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

Grid = tuple[int, ...]
_variants: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Each compiled variant of a kernel, and the values of its constants in the order of its signature."""


def kernel(function: Callable[..., Any] | None = None, *, varying: tuple[str, ...] = ()) -> Any:
    """`triton.jit` of the unwrapped function: the tests' type checker wraps every function of the package.

    varying: arguments, such as a number of rows, whose values must not specialize compiled variants.
    """
    if function is None:
        return lambda f: kernel(f, varying=varying)
    return triton.jit(inspect.unwrap(function), do_not_specialize=list(varying))


Argument: TypeAlias = Tensor | TensorDescriptor | float | None


def launch(function: Any, grid: Grid, *arguments: Argument, **constants: Any) -> None:
    """`function[grid](*arguments, **constants)` with a faster lookup of the compiled variant than Triton's.

    `constants` are compile-time values and launch options. Arguments of a kernel come before its constants. A GPU with
    too little shared memory for `num_stages` gets fewer stages.
    """
    if not isinstance(function, triton.JITFunction):  # the interpreter's
        function[grid](*arguments, **constants)
        return
    varying = function.do_not_specialize
    what = [_selects(value, name in varying) for name, value in zip(function.arg_names, arguments)]
    key = (id(function), torch.cuda.current_device(), *constants.values(), *what)
    if (variant := _variants.get(key)) is None:
        names = function.arg_names[len(arguments) :]
        _variants[key] = _first(function, grid, arguments, constants), tuple(constants[name] for name in names)
        return
    compiled, values = variant
    compiled[(*grid, 1, 1)[:3]](*arguments, *values)


def _first(function: Any, grid: Grid, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Compiles and launches; returns the compiled variant."""
    try:
        return function[grid](*arguments, **constants)
    except OutOfResources:
        if constants.get("num_stages", 1) == 1:
            raise
        return _first(function, grid, arguments, {**constants, "num_stages": constants["num_stages"] - 1})


def _selects(value: Argument, varies: bool) -> Any:
    """What Triton specializes variants on: a tensor's dtype and alignment, an integer's size and divisibility."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    if isinstance(value, int):
        return value >= 1 << 31 if varies else (value >= 1 << 31, value % 16 == 0, value == 1)
    return type(value)
