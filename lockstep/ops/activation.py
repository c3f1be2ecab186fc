"""The gated activation between the two products of a feed-forward."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native, plain
from lockstep.ops.saved_outputs import saved_output


def silu_mul(gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """`silu(gate) * up` in float32, rounded once (SwiGLU, arXiv 2002.05202)."""
    if torch.compiler.is_compiling() or not (native.usable(gate) or cuda.usable(gate)):
        return _reference(gate, up)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SiluMul.apply(gate, up)
    return _forward(gate, up)


def _reference(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.float()
    # A compiler would fuse its own exp; the plain form rounds identically at every position of a tensor.
    exp = torch.exp if torch.compiler.is_compiling() else plain.exp
    return (wide / (1 + exp(-wide)) * up.float()).to(gate.dtype)


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    if cuda.usable(gate):
        from lockstep.ops.cuda import rows

        return rows.silu_mul(gate, up)
    out = torch.empty_like(gate)
    native.call("silu_mul", gate.dtype, gate, up, out, *gate.shape)
    return out


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return saved_output("activation", lambda: _forward(gate, up))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if cuda.usable(gate):
            from lockstep.ops.cuda import rows

            return rows.silu_mul_backward(grads[0], gate, up)
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        native.call("silu_mul_backward", gate.dtype, grads[0].contiguous(), gate, up, grad_gate, grad_up, *gate.shape)
        return grad_gate, grad_up
