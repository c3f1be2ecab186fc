"""Normalization, rotation and activation of rows in Triton, each with its gradient.

A row is computed entirely in one program, and the shape of a program's tile depends only on the row's length.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.available import library
from lockstep.ops.cuda.kernel import kernel

TILE = 2048
"""Elements that a program handles at a time, if rows are short enough for several."""
GRADIENT_PROGRAMS = 256
"""Partial sums of a norm's weight gradient."""


def _rows_per_program(block: int) -> int:
    return max(1, TILE // block)


@kernel(varying=("rows",))
def _rms_norm_kernel(x, weight, out, scales, rows, eps, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < DIM)[None, :]
    place = row[:, None] * DIM + column[None, :]
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / DIM + eps)
    gain = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    tl.store(out + place, (wide * scale[:, None] * gain[None, :]).to(out.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < rows)


@kernel(varying=("rows",))
def _rms_norm_backward_kernel(
    grad_out, x, weight, scales, grad_x, grad_weight, rows,
    DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    gain = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
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


@library.operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=lambda x, weight, eps: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32),
    ),
)
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    dim = x.shape[-1]
    rows, block = x.numel() // dim, triton.next_power_of_2(dim)
    out, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    if rows:
        height = _rows_per_program(block)
        _rms_norm_kernel[(triton.cdiv(rows, height),)](
            x, weight, out, scales, rows, eps, DIM=dim, ROWS=height, BLOCK=block, num_warps=4
        )
    return out, scales


@library.operator(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scales) -> (Tensor, Tensor)",
    fake=lambda grad, x, weight, scales: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(weight),
    ),
)
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    grad, x = grad.contiguous(), x.contiguous()
    dim, rows = x.shape[-1], scales.numel()
    block = triton.next_power_of_2(dim)
    height = _rows_per_program(block)
    programs = max(1, min(GRADIENT_PROGRAMS, triton.cdiv(rows, height)))
    grad_x, parts = torch.empty_like(x), x.new_empty(programs, dim, dtype=torch.float32)
    _rms_norm_backward_kernel[(programs,)](
        grad, x, weight, scales, grad_x, parts, rows, DIM=dim, ROWS=height, BLOCK=block, num_warps=4
    )
    return grad_x, parts.sum(0).to(weight.dtype)


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _differentiate_rms_norm(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_x, grad_weight = _rms_norm_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_weight, None


library.differentiable("rms_norm", _save_rms_norm, _differentiate_rms_norm)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `lockstep.ops.rms_norm`, for rows of any leading shape."""
    out: Tensor = _rms_norm(x, weight, eps)[0]
    return out


@kernel(varying=("rows",))
def _rotary_kernel(
    x, cosines, sines, out, rows, heads, sign,
    HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < HALF)[None, :]
    place = row[:, None] * (2 * HALF) + column[None, :]
    angle = (row // heads)[:, None] * HALF + column[None, :]
    cos = tl.load(cosines + angle, mask=mask, other=0.0)
    sin = tl.load(sines + angle, mask=mask, other=0.0) * sign
    first = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + place + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, (first * cos - second * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(out + place + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=mask)


@library.operator(
    "rotary(Tensor x, Tensor cos, Tensor sin, float sign) -> Tensor",
    fake=lambda x, cos, sin, sign: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    tokens, heads, head_dim = x.shape
    out = torch.empty_like(x)
    if tokens:
        block = triton.next_power_of_2(head_dim // 2)
        height = _rows_per_program(block)
        _rotary_kernel[(triton.cdiv(tokens * heads, height),)](
            x, cos, sin, out, tokens * heads, heads, sign, HALF=head_dim // 2, ROWS=height, BLOCK=block, num_warps=4
        )
    return out


def _save_rotary(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])
    ctx.sign = inputs[3]


def _differentiate_rotary(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """The rotation by the negated angles."""
    return _rotate(grad, *ctx.saved_tensors, -ctx.sign), None, None, None


library.differentiable("rotary", _save_rotary, _differentiate_rotary)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `lockstep.ops.rotary`: `[tokens, heads, head_dim]` by angles `[tokens, head_dim / 2]`."""
    out: Tensor = _rotate(x, cos, sin, 1.0)
    return out


@kernel
def _silu_mul_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    wide = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    product = wide / (1.0 + tl.exp(-wide)) * tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, product.to(out.dtype.element_ty), mask=mask)


@kernel
def _silu_mul_backward_kernel(grad_out, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    grad = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
    wide = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-wide))
    slope = sigmoid * (1.0 + wide * (1.0 - sigmoid))
    tl.store(grad_gate + place, (grad * factor * slope).to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + place, (grad * wide * sigmoid).to(grad_up.dtype.element_ty), mask=mask)


@library.operator(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    fake=lambda gate, up: torch.empty_like(gate, memory_format=torch.contiguous_format),
)
def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out, count = torch.empty_like(gate), gate.numel()
    if count:
        _silu_mul_kernel[(triton.cdiv(count, TILE),)](gate, up, out, count, BLOCK=TILE, num_warps=4)
    return out


@library.operator(
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    fake=lambda grad, gate, up: (
        torch.empty_like(gate, memory_format=torch.contiguous_format),
        torch.empty_like(up, memory_format=torch.contiguous_format),
    ),
)
def _silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    if count:
        _silu_mul_backward_kernel[(triton.cdiv(count, TILE),)](
            grad, gate, up, grad_gate, grad_up, count, BLOCK=TILE, num_warps=4
        )
    return grad_gate, grad_up


def _save_silu_mul(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_silu_mul(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = _silu_mul_backward(grad, *ctx.saved_tensors)
    return grad_gate, grad_up


library.differentiable("silu_mul", _save_silu_mul, _differentiate_silu_mul)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As `lockstep.ops.silu_mul`."""
    out: Tensor = _silu_mul(gate, up)
    return out
