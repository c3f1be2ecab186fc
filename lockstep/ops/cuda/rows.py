"""Normalization, rotation and activations of rows in Triton, each with its gradient.

A row is computed entirely in one program, and the shape of a program's tile depends only on the row's length.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops import activation
from lockstep.ops.cuda.kernel import kernel, launch

TILE = 2048
"""Elements that a program processes at a time, if rows are short enough for several."""
GRADIENT_PROGRAMS = 1024
"""Programs of a norm's backward, each with a partial sum of the weight gradient."""
SLOPE, LIMIT = tl.constexpr(activation.SLOPE), tl.constexpr(activation.LIMIT)
LINEAR, CUBIC, BOUND = map(tl.constexpr, (activation.LINEAR, activation.CUBIC, activation.BOUND))


def _rows_per_program(block: int) -> int:
    return max(1, TILE // block)


@kernel
def _factors(weight, column, DIM: tl.constexpr, OFFSET: tl.constexpr):
    gain = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    return 1.0 + gain if OFFSET else gain


@kernel(varying=("rows",))
def _rms_norm_kernel(
    x, weight, out, scales, rows, eps,
    DIM: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < DIM)[None, :]
    place = row[:, None] * DIM + column[None, :]
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / DIM + eps)
    gain = _factors(weight, column, DIM, OFFSET)
    tl.store(out + place, (wide * scale[:, None] * gain[None, :]).to(out.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < rows)


@kernel(varying=("rows",))
def _rms_norm_backward_kernel(
    grad_out, x, weight, scales, grad_x, grad_weight, rows,
    DIM: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    gain = _factors(weight, column, DIM, OFFSET)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < DIM)[None, :]
        place = row[:, None] * DIM + column[None, :]
        grad = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * scale
        weighted = grad * gain[None, :]
        projection = tl.sum(weighted * normed, 1) / DIM
        result = (weighted - normed * projection[:, None]) * scale
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=mask)
        total += tl.sum(grad * normed, 0)
    tl.store(grad_weight + tl.program_id(0) * DIM + column, total, mask=column < DIM)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool) -> tuple[Tensor, Tensor]:
    """`lockstep.ops.rms_norm` of contiguous rows of any leading shape, and each row's scale, float32."""
    dim = x.shape[-1]
    rows, block = x.numel() // dim, triton.next_power_of_2(dim)
    out, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    if rows:
        height = _rows_per_program(block)
        launch(
            _rms_norm_kernel, (triton.cdiv(rows, height),),
            x, weight, out, scales, rows, eps, DIM=dim, OFFSET=offset, ROWS=height, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out, scales


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor, offset: bool) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and `weight`, of contiguous rows."""
    dim, rows = x.shape[-1], scales.numel()
    block = triton.next_power_of_2(dim)
    height = _rows_per_program(block)
    programs = max(1, min(GRADIENT_PROGRAMS, triton.cdiv(rows, height)))
    grad_x, parts = torch.empty_like(x), x.new_empty(programs, dim, dtype=torch.float32)
    launch(
        _rms_norm_backward_kernel, (programs,),
        grad, x, weight, scales, grad_x, parts, rows,
        DIM=dim, OFFSET=offset, ROWS=height, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return grad_x, parts.sum(0).to(weight.dtype)


@kernel(varying=("rows",))
def _rotary_kernel(
    x, cosines, sines, out, rows, heads, sign,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < HALF)[None, :]
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    PARTNER: tl.constexpr = 1 if INTERLEAVED else HALF
    place = row[:, None] * DIM + column[None, :] * STEP
    angle = (row // heads)[:, None] * HALF + column[None, :]
    cos = tl.load(cosines + angle, mask=mask, other=0.0)
    sin = tl.load(sines + angle, mask=mask, other=0.0) * sign
    first = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + place + PARTNER, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, (first * cos - second * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(out + place + PARTNER, (second * cos + first * sin).to(out.dtype.element_ty), mask=mask)
    for start in range(2 * HALF, DIM, BLOCK):
        mask = (row < rows)[:, None] & (start + column < DIM)[None, :]
        place = row[:, None] * DIM + start + column[None, :]
        tl.store(out + place, tl.load(x + place, mask=mask), mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    (tokens, heads, head_dim), half = x.shape, cos.shape[1]
    out = torch.empty_like(x)
    if tokens:
        block = triton.next_power_of_2(half)
        height = _rows_per_program(block)
        launch(
            _rotary_kernel, (triton.cdiv(tokens * heads, height),),
            x, cos, sin, out, tokens * heads, heads, sign,
            DIM=head_dim, HALF=half, INTERLEAVED=interleaved, ROWS=height, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@kernel
def _gelu(gate):
    # The value, its sigmoid's argument, and the argument's derivative. Comparisons propagate NaN.
    value = tl.where(gate < -BOUND, -BOUND, gate)
    x = tl.where(value > BOUND, BOUND, value)
    cubic = (x * x) * CUBIC
    return value, x * (cubic + LINEAR), x * (3.0 * cubic + LINEAR)


@kernel
def _gate_mul_kernel(gate, up, out, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    wide = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    argument = wide
    if GELU:
        wide, argument, _ = _gelu(wide)
    product = wide / (1.0 + tl.exp(-argument)) * tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, product.to(out.dtype.element_ty), mask=mask)


@kernel
def _gate_mul_backward_kernel(grad_out, gate, up, grad_gate, grad_up, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    grad = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
    wide = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    argument, inner = wide, wide
    if GELU:
        wide, argument, inner = _gelu(wide)
    sigmoid = 1.0 / (1.0 + tl.exp(-argument))
    slope = sigmoid * (1.0 + inner * (1.0 - sigmoid))
    tl.store(grad_gate + place, (grad * factor * slope).to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + place, (grad * wide * sigmoid).to(grad_up.dtype.element_ty), mask=mask)


@kernel
def _sigmoid_mul_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    sigmoid = 1.0 / (1.0 + tl.exp(-tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)))
    result = sigmoid * tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@kernel
def _sigmoid_mul_backward_kernel(grad_out, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    grad = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)))
    of_gate = grad * factor * (sigmoid * (1.0 - sigmoid))
    tl.store(grad_gate + place, of_gate.to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + place, (grad * sigmoid).to(grad_up.dtype.element_ty), mask=mask)


@kernel
def _clamped_swiglu_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    wide = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    # Comparisons propagate NaN.
    wide = tl.where(wide > LIMIT, LIMIT, wide)
    factor = tl.where(factor > LIMIT, LIMIT, tl.where(factor < -LIMIT, -LIMIT, factor))
    result = (factor + 1.0) * (wide / (1.0 + tl.exp(-(wide * SLOPE))))
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@kernel
def _clamped_swiglu_backward_kernel(grad_out, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    grad = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
    unclamped = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    wide = tl.where(unclamped > LIMIT, LIMIT, unclamped)
    factor = tl.where(other > LIMIT, LIMIT, tl.where(other < -LIMIT, -LIMIT, other))
    sigmoid = 1.0 / (1.0 + tl.exp(-(wide * SLOPE)))
    slope = (factor + 1.0) * sigmoid * (1.0 + wide * SLOPE * (1.0 - sigmoid))
    of_gate = tl.where(unclamped > LIMIT, 0.0, grad * slope)
    of_up = tl.where((other > LIMIT) | (other < -LIMIT), 0.0, grad * wide * sigmoid)
    tl.store(grad_gate + place, of_gate.to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + place, of_up.to(grad_up.dtype.element_ty), mask=mask)


@kernel
def _relu_squared_kernel(x, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    positive = tl.where(wide < 0.0, 0.0, wide)
    tl.store(out + place, (positive * positive).to(out.dtype.element_ty), mask=mask)


@kernel
def _relu_squared_backward_kernel(grad_out, x, grad_x, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    grad = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    result = tl.where(wide <= 0.0, 0.0, grad * (2.0 * wide))
    tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=mask)


def gate_mul(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """As `lockstep.ops.gelu_mul` or `silu_mul`, without gradient, of contiguous tensors."""
    out = torch.empty_like(gate)
    _elementwise(_gate_mul_kernel, gate, up, out, GELU=gelu)
    return out


def gate_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `up`."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _elementwise(_gate_mul_backward_kernel, grad, gate, up, grad_gate, grad_up, GELU=gelu)
    return grad_gate, grad_up


silu_mul, silu_mul_backward = partial(gate_mul, gelu=False), partial(gate_mul_backward, gelu=False)
gelu_mul, gelu_mul_backward = partial(gate_mul, gelu=True), partial(gate_mul_backward, gelu=True)


def sigmoid_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As `lockstep.ops.sigmoid_mul`, without gradient, of contiguous tensors."""
    out = torch.empty_like(gate)
    _elementwise(_sigmoid_mul_kernel, gate, up, out)
    return out


def sigmoid_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `up`."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _elementwise(_sigmoid_mul_backward_kernel, grad, gate, up, grad_gate, grad_up)
    return grad_gate, grad_up


def relu_squared(x: Tensor) -> Tensor:
    """As `lockstep.ops.relu_squared`, without gradient, of a contiguous tensor."""
    out = torch.empty_like(x)
    _elementwise(_relu_squared_kernel, x, out)
    return out


def relu_squared_backward(grad: Tensor, x: Tensor) -> Tensor:
    grad_x = torch.empty_like(x)
    _elementwise(_relu_squared_backward_kernel, grad, x, grad_x)
    return grad_x


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `lockstep.ops.clamped_swiglu`, without gradient, of contiguous tensors."""
    out = torch.empty_like(gate)
    _elementwise(_clamped_swiglu_kernel, gate, up, out)
    return out


def clamped_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `up`."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _elementwise(_clamped_swiglu_backward_kernel, grad, gate, up, grad_gate, grad_up)
    return grad_gate, grad_up


def _elementwise(function: Any, *tensors: Tensor, **constants: float) -> None:
    if count := tensors[0].numel():
        launch(function, (triton.cdiv(count, TILE),), *tensors, count, **constants, BLOCK=TILE, num_warps=4)
