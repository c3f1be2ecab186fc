"""Operators that are opaque to a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OperatorLibrary:
    """A namespace of `torch.ops`. Registered directly: `torch.library.custom_op` costs several times more per call."""

    def __init__(self, name: str):
        self.name = name
        self.schemas: list[str] = []
        """The schemas of all operators: a graph compiled with other schemas must not be reused."""
        self._library = torch.library.Library(name, "DEF")

    def operator(self, schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a function for CPU and CUDA tensors. `fake` returns empty results of the right shapes."""
        name = schema.partition("(")[0]

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.schemas.append(schema)
            self._library.define(schema)
            self._library.impl(name, function, "CUDA")
            self._library.impl(name, function, "CPU")
            torch.library.register_fake(f"{self.name}::{name}", fake, lib=self._library)
            overload: Callable[..., Any] = getattr(getattr(torch.ops, self.name), name).default
            return overload

        return register

    def differentiable(self, name: str, save: Callable[..., None], backward: Callable[..., Any]) -> None:
        """Registers an operator's gradient: `save(ctx, inputs, output)` after the forward, `backward(ctx, *grads)`.

        On the operator itself instead of in an `autograd.Function`, which `torch.compile` would trace into.
        """
        torch.library.register_autograd(f"{self.name}::{name}", backward, setup_context=save, lib=self._library)


library = OperatorLibrary("lockstep")
