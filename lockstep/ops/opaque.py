"""Operators that are opaque to a compiled graph, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.ops.needed_gradients import needs_gradient
from lockstep.ops.saved_outputs import saved_output


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


class Operator:
    """A function whose first two arguments are differentiable: eager calls and compiled graphs compute the same.

    Calls with a gradient save all arguments, of which tensors come first. `gradients(grad, *arguments, needed)` returns
    those of the first two, each shaped like its argument; `needed`, by default both, says which. `kind` is the name by
    which a recomputed forward finds a saved output.
    """

    def __init__(
        self,
        schema: str,
        forward: Callable[..., Tensor],
        fake: Callable[..., Tensor],
        gradients: Callable[..., Any],
        kind: str = "",
    ):
        self.forward, self.gradients, self.kind = forward, gradients, kind
        self._opaque = library.operator(schema, fake)(forward)
        name, _, rest = schema.partition("(")
        arguments = rest.partition(")")[0]
        others = arguments.count(",") - 1
        of_gradients = library.operator(
            f"{name}_gradients(Tensor grad, {arguments}) -> (Tensor, Tensor)",
            fake=lambda grad, *inputs: (empty_like(inputs[0]), empty_like(inputs[1])),
        )(gradients)
        library.differentiable(
            name,
            save=lambda ctx, inputs, output: _save(ctx, inputs),
            backward=lambda ctx, grad: (*of_gradients(grad, *ctx.saved_tensors, *ctx.settings), *[None] * others),
        )

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._opaque(*arguments)
        if torch.is_grad_enabled() and (arguments[0].requires_grad or arguments[1].requires_grad):
            return _Differentiated.apply(self, *arguments)
        return self.forward(*arguments)


def _save(ctx: Any, arguments: tuple[Any, ...]) -> None:
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.settings = arguments[len(tensors) :]


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Operator, *arguments: Any) -> Tensor:
        _save(ctx, arguments)
        ctx.operator = operator
        return saved_output(operator.kind, lambda: operator.forward(*arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        arguments = *ctx.saved_tensors, *ctx.settings  # a checkpoint unpacks saved tensors only once
        needed = needs_gradient(ctx, 0), needs_gradient(ctx, 1)
        gradients = ctx.operator.gradients(grads[0], *arguments, needed=needed)
        return None, *gradients, *[None] * (len(arguments) - 2)


def empty_like(x: Tensor) -> Tensor:
    """An empty contiguous tensor, also for an `x` that is not contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
