"""The row-invariant matrix product.

Each element is one chain of fused multiply-adds along K in ascending order, whatever the number of rows: on the CPU a
product of our own (`native/product.cpp`), in plain PyTorch the same chain step by step (`plain.product`), on NVIDIA
GPUs a fixed order of pieces (`cuda/linear.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native, plain
from lockstep.ops.asked import asked_for
from lockstep.ops.forms import FORMS
from lockstep.ops.kept import keep
from lockstep.ops.opaque import library
from lockstep.ops.packed_weights import packed


def linear(x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "rows out"]:
    """`x @ weight.T`, where the bits of a row do not depend on how many other rows there are."""
    if (form := FORMS.get(type(weight))) is not None:
        return form.linear(x, weight)
    if cuda.usable(x):
        from lockstep.ops.cuda.linear import product as triton_product

        return triton_product(x, weight)
    if torch.compiler.is_compiling():
        return _opaque_linear(x, weight)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight)
    return product(x, weight)


def product(x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "rows out"]:
    """`x @ weight.T` without gradient, of tensors with any strides. Raises ValueError where they do not fit."""
    if x.shape[1] != weight.shape[1] or x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(
            f"a product needs factors of one width, dtype and device, but has {list(x.shape)} {x.dtype} on {x.device} "
            f"and {list(weight.shape)} {weight.dtype} on {weight.device}"
        )
    if native.usable(x):
        out = x.new_empty(x.shape[0], weight.shape[0])
        panels = None if native.is_pretending() else packed(weight, x.shape[0])
        native.call("product", x.dtype, x, *x.stride(), weight, *weight.stride(), panels, out, *x.shape, out.shape[1])
        return out
    if x.is_meta:
        return F.linear(x, weight)
    return plain.product(x, weight.T).to(x.dtype)


def linear_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and of `weight`."""
    return input_gradient(grad, weight), weight_gradient(grad, x)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of a product's input."""
    return grad @ weight if _by_library(grad) else product(grad, weight.T)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of a product's weight: a sum over all rows."""
    return grad.T @ x if _by_library(grad) else product(grad.T, x.T)


def _by_library(grad: Tensor) -> bool:
    """Whether the gradients' products are a library's, whose bits are its own.

    On a CPU only where it multiplies pairs of bfloat16, at the machine's ceiling: everywhere else our own is as fast
    or faster, and its bits are those of every processor.
    """
    if not native.usable(grad):
        return True
    return grad.dtype == torch.bfloat16 and native.arithmetic() == "bf16_pairs"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return keep("linear", lambda: product(x, weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        grad_x = input_gradient(grad, weight) if asked_for(ctx, 0) else None
        return grad_x, weight_gradient(grad, x) if asked_for(ctx, 1) else None


# Compiled code calls the product as a whole: no compiler has a say in its order of summation.
@library.operator(
    "linear(Tensor x, Tensor weight) -> Tensor", fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0])
)
def _opaque_linear(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        return linear(x, weight)


@library.operator(
    "linear_gradients(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)",
    fake=lambda grad, x, weight: (
        grad.new_empty(grad.shape[0], weight.shape[1]),
        grad.new_empty(grad.shape[1], x.shape[1]),
    ),
)
def _opaque_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return linear_gradients(grad, x, weight)


library.differentiable(
    "linear",
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=lambda ctx, grad: _opaque_gradients(grad, *ctx.saved_tensors),
)
