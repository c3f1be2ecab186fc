"""The clamped gated activation of gpt-oss, between an expert's two products."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native, plain
from lockstep.ops.opaque import library
from lockstep.ops.saved_outputs import saved_output

SLOPE, LIMIT = 1.702, 7.0
"""Also defined in rows.cpp."""


def clamped_swiglu(gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """`(up + 1) · gate · sigmoid(1.702 · gate)`, with gate clamped to 7 and up to [-7, 7] (arXiv 2508.10925).

    In float32, rounded once. The gradient at a bound is that of the interior, in every form and torch version.
    """
    if torch.compiler.is_compiling():
        return _opaque(gate, up)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _ClampedSwiGLU.apply(gate, up)
    return _forward(gate, up)


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    if cuda.usable(gate):
        from lockstep.ops.cuda import clamped_swiglu

        return clamped_swiglu.forward(gate, up, SLOPE, LIMIT)
    if not native.usable(gate):
        wide, factor, sigmoid = _parts(gate, up)
        return ((factor + 1) * (wide * sigmoid)).to(gate.dtype)
    out = torch.empty_like(gate)
    native.call("clamped_swiglu", gate.dtype, gate, up, out, gate.numel())
    return out


def _backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    if cuda.usable(gate):
        from lockstep.ops.cuda import clamped_swiglu

        return clamped_swiglu.backward(grad, gate, up, SLOPE, LIMIT)
    if not native.usable(gate):
        wide, factor, sigmoid = _parts(gate, up)
        of_gate = (factor + 1) * sigmoid * (1 + SLOPE * wide * (1 - sigmoid)) * (gate <= LIMIT)
        of_up = wide * sigmoid * (up.abs() <= LIMIT)
        return (grad.float() * of_gate).to(gate.dtype), (grad.float() * of_up).to(up.dtype)
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    native.call("clamped_swiglu_backward", gate.dtype, grad, gate, up, grad_gate, grad_up, gate.numel())
    return grad_gate, grad_up


def _parts(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The clamped gate, the clamped factor, and the gate's sigmoid, in float32."""
    wide, factor = gate.float().clamp(max=LIMIT), up.float().clamp(-LIMIT, LIMIT)
    return wide, factor, 1 / (1 + plain.exp(-(SLOPE * wide)))


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return saved_output("activation", lambda: _forward(gate, up))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return _backward(grads[0], *ctx.saved_tensors)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# Compiled code calls the activation as one operator: the bits are those of the eager form.
@library.operator("clamped_swiglu(Tensor gate, Tensor up) -> Tensor", fake=lambda gate, up: _empty_like(gate))
def _opaque(gate: Tensor, up: Tensor) -> Tensor:
    return _forward(gate, up)


@library.operator(
    "clamped_swiglu_gradients(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    fake=lambda grad, gate, up: (_empty_like(gate), _empty_like(up)),
)
def _opaque_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(grad, gate, up)


library.differentiable(
    "clamped_swiglu",
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=lambda ctx, grad: _opaque_gradients(grad, *ctx.saved_tensors),
)
