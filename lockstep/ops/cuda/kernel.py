"""How a function becomes a Triton kernel here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def kernel(function: Callable[..., Any] | None = None, *, varying: tuple[str, ...] = ()) -> Any:
    """`triton.jit` of the original function: the tests' type checker wraps every function of the package.

    varying: arguments, such as a number of rows, whose value must not select between compiled variants.
    """
    if function is None:
        return lambda f: kernel(f, varying=varying)
    return triton.jit(inspect.unwrap(function), do_not_specialize=list(varying))
