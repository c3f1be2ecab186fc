"""The gated activations between the two products of a feed-forward, in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native, plain
from lockstep.ops.opaque import Operator, empty_like
from lockstep.ops.saved_outputs import saved_output

SLOPE, LIMIT = 1.702, 7.0
"""Of `clamped_swiglu`; also defined in rows.cpp."""


def silu_mul(gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """`silu(gate) * up` (SwiGLU, arXiv 2002.05202)."""
    if torch.compiler.is_compiling() or not (native.usable(gate) or cuda.usable(gate)):
        return _reference(gate, up)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SiluMul.apply(gate, up)
    return _silu_mul(gate, up)


def clamped_swiglu(gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """`(up + 1) · gate · sigmoid(1.702 · gate)`, with gate clamped to 7 and up to [-7, 7] (gpt-oss, arXiv 2508.10925).

    The gradient at a bound is that of the interior, in every form and torch version.
    """
    return _clamped_swiglu(gate, up)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return saved_output("activation", lambda: _silu_mul(gate, up))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return _silu_mul_gradients(grads[0], *ctx.saved_tensors)


def _reference(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.float()
    # A compiler would fuse its own exp; the plain form rounds identically at every position of a tensor.
    exp = torch.exp if torch.compiler.is_compiling() else plain.exp
    return (wide / (1 + exp(-wide)) * up.float()).to(gate.dtype)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    if cuda.usable(gate):
        from lockstep.ops.cuda import rows

        return rows.silu_mul(gate, up)
    out = torch.empty_like(gate)
    native.call("silu_mul", gate.dtype, gate, up, out, *gate.shape)
    return out


def _silu_mul_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if cuda.usable(gate):
        from lockstep.ops.cuda import rows

        return rows.silu_mul_backward(grad, gate, up)
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    native.call("silu_mul_backward", gate.dtype, grad.contiguous(), gate, up, grad_gate, grad_up, *gate.shape)
    return grad_gate, grad_up


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    if cuda.usable(gate):
        from lockstep.ops.cuda import rows

        return rows.clamped_swiglu(gate, up, SLOPE, LIMIT)
    if not native.usable(gate):
        wide, factor, sigmoid = _parts(gate, up)
        return ((factor + 1) * (wide * sigmoid)).to(gate.dtype)
    out = torch.empty_like(gate)
    native.call("clamped_swiglu", gate.dtype, gate, up, out, gate.numel())
    return out


def _clamped_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    if cuda.usable(gate):
        from lockstep.ops.cuda import rows

        return rows.clamped_swiglu_backward(grad, gate, up, SLOPE, LIMIT)
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


# Compiled code calls it as one operator: the bits are those of the eager form.
_clamped_swiglu = Operator(
    "clamped_swiglu(Tensor gate, Tensor up) -> Tensor",
    _clamped,
    fake=lambda gate, up: empty_like(gate),
    gradients=_clamped_gradients,
    kind="activation",
)
