"""The gradient of what `delta_rows` computes for packed sequences: norms, activation and convolution."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.delta_rows import ELEMENTS, EPS, sizes_of
from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.delta_reference import DeltaTerms

ROWS, CHANNELS = 64, 64
"""The tile of the convolution's gradient."""


@kernel
def features_of(x, line, inside, d, DIM: tl.constexpr):
    """Features `d` of some lines."""
    mask = inside[:, None] & (d < DIM)[None, :]
    return tl.load(x + line[:, None] * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)


@kernel
def _of_group(grad, row, inside, key_head, d, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr):
    """The sum of the gradients of a key head in its heads of values."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    total = features_of(grad, row * VALUE_HEADS + key_head * GROUP, inside, d, DIM)
    for index in range(1, GROUP):
        total += features_of(grad, row * VALUE_HEADS + key_head * GROUP + index, inside, d, DIM)
    return total


@kernel(varying=("rows", "sequences"))
def _channels_kernel(
    mixed, conv, grad_q, grad_k, grad_v, grad_channels, row_sequences, starts, rows, sequences,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the convolution's outputs, of one head's rows, float32; zero for padding rows."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head, d = tl.program_id(1), tl.arange(0, BLOCK)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    sequence = tl.load(row_sequences + row, mask=row < rows, other=sequences)
    inside = sequence < sequences
    position = row - tl.load(starts + sequence, mask=inside, other=0)
    is_value, value_head = head >= 2 * KEY_HEADS, tl.maximum(head - 2 * KEY_HEADS, 0)
    channel = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM, head * KEY_DIM) + d
    in_head = d < tl.where(is_value, VALUE_DIM, KEY_DIM)
    x = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        mask = (inside & (position >= back))[:, None] & in_head[None, :]
        value = tl.load(mixed + (row - back)[:, None] * CHANNELS + channel[None, :], mask=mask, other=0.0)
        weight = tl.load(conv + channel * WIDTH + tap, mask=in_head, other=0.0).to(tl.float32)
        x = tl.fma(value.to(tl.float32), weight[None, :], x)
    sigmoid = 1.0 / (1.0 + tl.exp(-x))
    if is_value:
        grad = features_of(grad_v, row * VALUE_HEADS + value_head, inside, d, VALUE_DIM)
    else:
        if head < KEY_HEADS:
            grad = _of_group(grad_q, row, inside, head, d, KEY_HEADS, VALUE_HEADS, KEY_DIM) * (KEY_DIM**-0.5)
        else:
            grad = _of_group(grad_k, row, inside, head % KEY_HEADS, d, KEY_HEADS, VALUE_HEADS, KEY_DIM)
        scale = (1.0 / tl.sqrt(tl.sum(x * sigmoid * x * sigmoid, 1) + EPS))[:, None]
        normed = x * sigmoid * scale
        grad = (grad - normed * tl.sum(grad * normed, 1)[:, None]) * scale
    grad = grad * sigmoid * (1.0 + x * (1.0 - sigmoid))
    mask = (row < rows)[:, None] & in_head[None, :]
    tl.store(grad_channels + row[:, None] * CHANNELS + channel[None, :], grad, mask=mask)


@kernel(varying=("rows", "sequences"))
def _conv_kernel(
    mixed, conv, grad_channels, grad_mixed, grad_conv, row_sequences, starts, rows, sequences,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the rows, and of the weights this tile's share."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, in_block = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), channel < CHANNELS
    sequence = tl.load(row_sequences + row, mask=row < rows, other=sequences)
    end = tl.load(starts + sequence + 1, mask=sequence < sequences, other=0)
    place = row[:, None] * CHANNELS + channel[None, :]
    value = tl.load(mixed + place, mask=(row < end)[:, None] & in_block[None, :], other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        ahead = WIDTH - 1 - tap
        mask = (row + ahead < end)[:, None] & in_block[None, :]
        grad = tl.load(grad_channels + place + ahead * CHANNELS, mask=mask, other=0.0)
        weight = tl.load(conv + channel * WIDTH + tap, mask=in_block, other=0.0).to(tl.float32)
        total = tl.fma(grad, weight[None, :], total)
        part = (tl.program_id(0).to(tl.int64) * CHANNELS + channel) * WIDTH + tap
        tl.store(grad_conv + part, tl.sum(grad * value, 0), mask=in_block)
    mask = (row < rows)[:, None] & in_block[None, :]
    tl.store(grad_mixed + place, total.to(grad_mixed.dtype.element_ty), mask=mask)


def input_gradients(
    mixed: Tensor, terms: DeltaTerms, starts: Tensor, row_sequences: Tensor, *grads: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the mixed rows, and of the convolution's weights, float32."""
    (count, channels), width, sequences = mixed.shape, terms.conv.shape[1], len(starts) - 1
    conv, grad_channels = terms.conv.contiguous(), torch.empty_like(mixed, dtype=torch.float32)
    block = triton.next_power_of_2(max(terms.key_dim, terms.value_dim))
    height = max(1, ELEMENTS // block)
    launch(
        _channels_kernel, (triton.cdiv(count, height), 2 * terms.key_heads + terms.value_heads),
        mixed, conv, *grads, grad_channels, row_sequences, starts, count, sequences,
        **sizes_of(terms), WIDTH=width, ROWS=height, BLOCK=block, num_warps=4,
    )  # fmt: skip
    tiles, grad_mixed = triton.cdiv(count, ROWS), torch.empty_like(mixed)
    shares = grad_channels.new_empty(tiles, channels, width)
    launch(
        _conv_kernel, (tiles, triton.cdiv(channels, CHANNELS)),
        mixed, conv, grad_channels, grad_mixed, shares, row_sequences, starts, count, sequences,
        CHANNELS=channels, WIDTH=width, ROWS=ROWS, BLOCK=CHANNELS, num_warps=4,
    )  # fmt: skip
    return grad_mixed, shares.sum(0)
