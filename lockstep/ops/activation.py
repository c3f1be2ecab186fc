"""The activations between the two products of a feed-forward, in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native, plain
from lockstep.ops.opaque import Operator, empty_like
from lockstep.ops.saved_outputs import saved_output

SLOPE, LIMIT = 1.702, 7.0
"""Of `clamped_swiglu`; also defined in rows.cpp."""
LINEAR, CUBIC, BOUND = 1.5957691216057308, 0.07135481627260025, 10.0
"""Of `gelu_mul`: 2 √(2/π), that times 0.044715, and where the sigmoid is 0 or 1; also defined in rows.cpp."""


def silu_mul(gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """`silu(gate) * up` (SwiGLU, arXiv 2002.05202)."""
    if torch.compiler.is_compiling() or not (native.usable(gate) or cuda.usable(gate)):
        return _reference(gate, up)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SiluMul.apply(gate, up)
    return _silu_mul(gate, up)


def gelu_mul(gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """`gelu(gate) * up` with GELU's tanh form, x · sigmoid(2 √(2/π) (x + 0.044715 x³)) (arXiv 1606.08415).

    GELU is 0 below -10, also at minus infinity, and the gate above 10, in every form up to 1e-36.
    """
    return _gelu_mul(gate, up)


def clamped_swiglu(gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """`(up + 1) · gate · sigmoid(1.702 · gate)`, with gate clamped to 7 and up to [-7, 7] (gpt-oss, arXiv 2508.10925).

    The gradient at a bound is that of the interior, in every form and torch version.
    """
    return _clamped_swiglu(gate, up)


def sigmoid_mul(gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """`sigmoid(gate) * up`: gated attention (arXiv 2505.06708)."""
    return _sigmoid_mul(gate, up)


def relu_squared(x: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """`relu(x)²` (arXiv 2109.08668): one rounded product, so every form has the same bits."""
    if torch.compiler.is_compiling() or not (native.usable(x) or cuda.usable(x)):
        return x.float().relu().square().to(x.dtype)
    if torch.is_grad_enabled() and x.requires_grad:
        return _ReluSquared.apply(x)
    return _relu_squared(x)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return saved_output("activation", lambda: _silu_mul(gate, up))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return _kernel_gradients("silu_mul", grads[0], *ctx.saved_tensors)


class _ReluSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return saved_output("activation", lambda: _relu_squared(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,), grad = ctx.saved_tensors, grads[0].contiguous()
        if cuda.usable(x):
            from lockstep.ops.cuda import rows

            return rows.relu_squared_backward(grad, x)
        grad_x = torch.empty_like(x)
        native.call("relu_squared_backward", x.dtype, grad, x, grad_x, x.numel())
        return grad_x


def _reference(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.float()
    # A compiler would fuse its own exp; the plain form rounds identically at every position of a tensor.
    exp = torch.exp if torch.compiler.is_compiling() else plain.exp
    return (wide / (1 + exp(-wide)) * up.float()).to(gate.dtype)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _kernel("silu_mul", gate.contiguous(), up.contiguous())


def _relu_squared(x: Tensor) -> Tensor:
    x = x.contiguous()
    if cuda.usable(x):
        from lockstep.ops.cuda import rows

        return rows.relu_squared(x)
    out = torch.empty_like(x)
    native.call("relu_squared", x.dtype, x, out, x.numel())
    return out


def _kernel(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """The kernel of this name, of contiguous tensors."""
    if cuda.usable(gate):
        from lockstep.ops.cuda import rows

        out: Tensor = getattr(rows, name)(gate, up)
        return out
    out = torch.empty_like(gate)
    native.call(name, gate.dtype, gate, up, out, gate.numel())
    return out


def _kernel_gradients(name: str, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    if cuda.usable(gate):
        from lockstep.ops.cuda import rows

        gradients: tuple[Tensor, Tensor] = getattr(rows, f"{name}_backward")(grad, gate, up)
        return gradients
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    native.call(f"{name}_backward", gate.dtype, grad, gate, up, grad_gate, grad_up, gate.numel())
    return grad_gate, grad_up


def _gated(
    name: str,
    plain_form: Callable[[Tensor, Tensor], Tensor],
    plain_slopes: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Operator:
    """The kernels of this name, or the plain form and its derivatives by gate and up, all in float32.

    Compiled code calls it as one operator: the bits are those of the eager form.
    """

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        if native.usable(gate) or cuda.usable(gate):
            return _kernel(name, gate, up)
        return plain_form(gate.float(), up.float()).to(gate.dtype)

    def gradients(
        grad: Tensor, gate: Tensor, up: Tensor, needed: tuple[bool, bool] = (True, True)
    ) -> tuple[Tensor, Tensor]:
        gate, up = gate.contiguous(), up.contiguous()
        if native.usable(gate) or cuda.usable(gate):
            return _kernel_gradients(name, grad, gate, up)
        of_gate, of_up = plain_slopes(gate.float(), up.float())
        return (grad.float() * of_gate).to(gate.dtype), (grad.float() * of_up).to(up.dtype)

    return Operator(
        f"{name}(Tensor gate, Tensor up) -> Tensor",
        forward,
        fake=lambda gate, up: empty_like(gate),
        gradients=gradients,
        kind="activation",
    )


def _clamped(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The clamped gate, the clamped factor, and the gate's sigmoid."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate, up, 1 / (1 + plain.exp(-(SLOPE * gate)))


def _clamped_form(gate: Tensor, up: Tensor) -> Tensor:
    value, factor, sigmoid = _clamped(gate, up)
    return (factor + 1) * (value * sigmoid)


def _clamped_slopes(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    value, factor, sigmoid = _clamped(gate, up)
    of_gate = (factor + 1) * sigmoid * (1 + SLOPE * value * (1 - sigmoid)) * (gate <= LIMIT)
    return of_gate, value * sigmoid * (up.abs() <= LIMIT)


def _gelu(gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gate, its sigmoid, and the gate times the derivative of the sigmoid's argument."""
    # Clamped, since x³ would overflow.
    value, x = gate.clamp(min=-BOUND), gate.clamp(-BOUND, BOUND)
    cubic = CUBIC * (x * x)
    power = plain.exp(x * (cubic + LINEAR))
    return value, power / (power + 1), x * (3 * cubic + LINEAR)


def _gelu_form(gate: Tensor, up: Tensor) -> Tensor:
    value, sigmoid, _ = _gelu(gate)
    return value * sigmoid * up


def _gelu_slopes(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    value, sigmoid, inner = _gelu(gate)
    return up * sigmoid * (1 + inner * (1 - sigmoid)), value * sigmoid


def _sigmoid_form(gate: Tensor, up: Tensor) -> Tensor:
    return 1 / (1 + plain.exp(-gate)) * up


def _sigmoid_slopes(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = 1 / (1 + plain.exp(-gate))
    return up * sigmoid * (1 - sigmoid), sigmoid


_sigmoid_mul = _gated("sigmoid_mul", _sigmoid_form, _sigmoid_slopes)
_clamped_swiglu = _gated("clamped_swiglu", _clamped_form, _clamped_slopes)
_gelu_mul = _gated("gelu_mul", _gelu_form, _gelu_slopes)
