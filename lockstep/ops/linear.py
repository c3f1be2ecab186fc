"""The row-invariant matrix product.

A library may pick another order of summation for other row counts, so a row's bits would depend on its
neighbours. Padding the rows to a multiple that `invariance` found safe for the dtype and shape prevents it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native
from lockstep.ops.asked import asked_for
from lockstep.ops.few_rows import FEW_ROWS, few_rows_product
from lockstep.ops.forms import FORMS
from lockstep.ops.kept import keep
from lockstep.ops.opaque import library

ROW_MULTIPLE = 8
"""At a multiple of this the library's product needs no padding."""


def padded_rows(rows: int) -> int:
    """How many rows a caller that can choose should pass, so that `linear` need not pad by itself."""
    return rows if rows <= FEW_ROWS else -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


# Row counts whose bits are compared with those of PROBE_ROWS rows: all small ones, and odd and even larger ones.
PROBE_ROWS = 64
PROBE_COUNTS = (*range(1, 34), 40, 48, 56, 63, 65, 72, 96, 127, 128, 200, 256, 264, 511, 512)
MULTIPLES = (1, 2, 4, 8, 16, 32)


def linear(x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "rows out"]:
    """`x @ weight.T`, where the bits of a row do not depend on how many other rows there are.

    Raises RuntimeError if no row padding makes the library's product row-invariant for this dtype and shape.
    """
    if (form := FORMS.get(type(weight))) is not None:
        return form.linear(x, weight)
    if cuda.usable(x):
        from lockstep.ops.cuda.linear import product as triton_product

        return triton_product(x, weight)
    if torch.compiler.is_compiling():
        return _opaque_linear(x, weight)
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not needs_gradient and (fast := few_rows_product(x, weight)) is not None:
        return fast
    rows = x.shape[0]
    multiple = 1 if native.is_pretending() else row_multiple(x.dtype, x.device.type, weight.shape[1], weight.shape[0])
    missing = -rows % multiple
    if missing:
        return linear(F.pad(x, (0, 0, 0, missing)), weight)[:rows]
    return _Linear.apply(x, weight) if needs_gradient else product(x, weight)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """The library's own product, not padded: oneDNN's for float32 on the CPU, else `F.linear`.

    In float32 oneDNN's was 2.3 times as fast as the BLAS that `F.linear` calls, on an AMD processor with AVX-512;
    in bfloat16 both are oneDNN's.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def linear_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and of `weight`; their bits need not be row-invariant."""
    return input_gradient(grad, weight), weight_gradient(grad, x)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of a product's input."""
    return product(grad, weight.T) if grad.dtype == torch.float32 else grad @ weight


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of a product's weight: a sum over all rows."""
    return product(grad.T, x.T) if grad.dtype == torch.float32 else grad.T @ x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return keep("linear", lambda: product(x, weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), grad = ctx.saved_tensors, grads[0].contiguous()
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
    fake=lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)),
)
def _opaque_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return linear_gradients(grad.contiguous(), x, weight)


library.differentiable(
    "linear",
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=lambda ctx, grad: _opaque_gradients(grad, *ctx.saved_tensors),
)


@cache
def row_multiple(dtype: torch.dtype, device: str, in_features: int, out_features: int) -> int:
    """The smallest multiple of rows at which the product of this shape was seen to be row-invariant here.

    Measured once a process for each shape, on random data. Raises RuntimeError if there is none.
    """
    if device == "meta":
        return 1
    # The order of summation along K is what can differ; a slice of the columns stands for a wide matrix.
    with torch.inference_mode():
        unsafe = _unsafe_row_counts(dtype, device, in_features, min(out_features, 4096))
    for multiple in MULTIPLES:
        if not any(count % multiple == 0 for count in unsafe):
            return multiple
    raise RuntimeError(
        f"the matrix product is not row-invariant on this {device} for {dtype}, {in_features} -> {out_features}: "
        f"even multiples of {MULTIPLES[-1]} rows change a row's bits (row counts {sorted(unsafe)}). "
        "Trainer and generator cannot agree here; use another dtype or another build of torch."
    )


def _unsafe_row_counts(dtype: torch.dtype, device: str, in_features: int, out_features: int) -> set[int]:
    generator = torch.Generator().manual_seed(in_features * 1_000_003 + out_features)
    x = torch.randn(max(PROBE_COUNTS), in_features, generator=generator).to(device, dtype)
    weight = (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).to(device, dtype)
    expected = product(x[:PROBE_ROWS], weight)
    unsafe = set()
    for count in PROBE_COUNTS:
        common = min(count, PROBE_ROWS)
        first = product(x[:count], weight)[:common]
        # The last rows too: a library may treat the remainder of its row tiles in another way.
        last = product(x[PROBE_ROWS - common :][:count], weight)[:common]
        if not (torch.equal(first, expected[:common]) and torch.equal(last, expected[PROBE_ROWS - common :])):
            unsafe.add(count)
    return unsafe
