"""Products of 8- and 4-bit integers on NVIDIA GPUs, with the bits of every other processor. Not measured on one yet.

int8: a kernel computes codes and scales of rows, the library multiplies the codes (`torch._int_mm`), and another kernel
the sums by the scales. Sums of integers are exact, so nothing that the library chooses can change a bit.

int4: one kernel. A group's sum is one step of the tensor cores, and the groups' sums are joined in ascending order by
one fused multiply-add each. Neither depends on a tile's size. Operands are stored group by group, so that a tile of one
group is contiguous, two weights in a byte.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.integer_linear import quantized_weight

MULTIPLE = 16
"""Of an int8 product's inner and outer sizes, which are padded with zeros: its rows then begin at multiples of 16
bytes. `torch._int_mm` needs multiples of 8."""
FEWEST_ROWS = 32
"""Of an int8 product; `torch._int_mm` needs more than 16."""
TILE = 4096
"""Numbers that a program quantizes at a time, if rows are short enough for several."""
ROUNDING: tl.constexpr = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2^22 and subtracted again, it leaves the nearest integer, ties to even."""
FEW_ROWS, FEW_COLUMNS, COLUMNS = 16, 32, 128
"""An int4 product's tile: in decode, many narrow ones read the weight with the whole GPU."""


@kernel(varying=("COUNT",))
def _quantize_kernel(
    x, codes, scales, COUNT, GROUPS, STRIDE, OF_GROUP, OF_ROW, ROWS,
    WIDTH: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """8-bit codes of COUNT groups of WIDTH numbers, GROUPS in a row of `x`, and their scales `[GROUPS, ROWS]`."""
    line, column = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, BLOCK)
    row, group = (line // GROUPS).to(tl.int64), (line % GROUPS).to(tl.int64)
    mask = (line < COUNT)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * STRIDE + group[:, None] * WIDTH + column[None, :]
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    # As integers, magnitudes have the same order, and NaN is the largest.
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = largest < 0x7F800000
    scale = tl.div_rn(tl.where(finite, largest, 0).to(tl.float32, bitcast=True), 127.0)
    used = finite & (scale != 0.0)
    ratio = tl.div_rn(values, tl.where(used, scale, 1.0)[:, None])
    ratio = tl.where(used[:, None], ratio, 0.0)
    code = tl.minimum(tl.maximum((ratio + ROUNDING) - ROUNDING, -127.0), 127.0)
    target = row[:, None] * OF_ROW + group[:, None] * OF_GROUP + column[None, :]
    tl.store(codes + target, code.to(tl.int8), mask=mask)
    tl.store(scales + group * ROWS + row, tl.where(finite, scale, float("nan")), mask=line < COUNT)


@kernel(varying=("ROWS",))
def _scale_kernel(sums, of_rows, of_columns, out, ROWS, COLUMNS, STRIDE, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    total = tl.load(sums + row[:, None] * STRIDE + column[None, :], mask=mask, other=0).to(tl.float32)
    total *= tl.load(of_rows + row, mask=row < ROWS, other=0.0)[:, None]
    total *= tl.load(of_columns + column, mask=column < COLUMNS, other=0.0)[None, :]
    tl.store(out + row[:, None] * COLUMNS + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@kernel(varying=("M",))
def _int4_kernel(
    codes, scales, weight, of_weight, out, M, N, GROUPS,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows `[GROUPS, M, GROUP]` with scales `[GROUPS, M]`, and weights `[GROUPS, N, GROUP / 2]`, two in a byte, with
    scales `[GROUPS, N]`."""
    HALF: tl.constexpr = GROUP // 2
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask, column_mask = row < M, column < N
    left_places = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    right_places = column[:, None] * HALF + tl.arange(0, HALF)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(GROUPS):
        left = tl.load(codes + left_places, mask=row_mask[:, None], other=0)
        pairs = tl.load(weight + right_places, mask=column_mask[:, None], other=0)
        # Shifts to the right keep the sign.
        right = tl.interleave((pairs << 4) >> 4, pairs >> 4)
        sums = tl.dot(left, tl.trans(right), out_dtype=tl.int32).to(tl.float32)
        of_row = tl.load(scales + row, mask=row_mask, other=0.0)
        of_column = tl.load(of_weight + column, mask=column_mask, other=0.0).to(tl.float32)
        total = tl.fma(sums * of_column[None, :], tl.broadcast_to(of_row[:, None], (BLOCK_M, BLOCK_N)), total)
        codes += M * GROUP
        weight += N * HALF
        scales += M
        of_weight += N
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(out + row[:, None] * N + column[None, :], total.to(out.dtype.element_ty), mask=mask)


def words(outputs: int, depth: int, group: int) -> int:
    """The size of a packed weight in words of 4 bytes: its codes, then its scales."""
    if group:
        return outputs * depth // 8 + -(-outputs * (depth // group) // 2)
    return _padded(outputs) * _padded(depth) // 4 + outputs


def pack(weight: Tensor, panels: Tensor, group: int) -> None:
    """Writes a weight's codes and scales, group by group."""
    outputs, depth = weight.shape
    of_codes, of_scales = _parts(panels, outputs, depth, group)
    if not group:
        _quantize(weight, of_codes[None], of_scales)
        return
    codes, scales = quantized_weight(weight, group)
    codes = codes.to(torch.int8).transpose(0, 1)
    of_codes.copy_(codes[..., 1::2] << 4 | codes[..., ::2] & 15)
    of_scales.copy_(scales[..., 0].T)


def _parts(panels: Tensor, outputs: int, depth: int, group: int) -> tuple[Tensor, Tensor]:
    """A packed weight's codes, `[groups, out, group / 2]` or padded `[out, in]`, and its scales `[groups, out]`."""
    groups = depth // group if group else 1
    shape = (groups, outputs, group // 2) if group else (_padded(outputs), _padded(depth))
    codes, scales = panels.split([prod(shape) // 4, panels.numel() - prod(shape) // 4])
    # Those of 4-bit integers are defined in bfloat16.
    scales = scales.view(torch.bfloat16 if group else torch.float32)[: groups * outputs]
    return codes.view(torch.int8).view(shape), scales.view(groups, outputs)


def product(x: Tensor, panels: Tensor, outputs: int, group: int) -> Tensor:
    """The product of rows and a packed weight, rounded to the dtype of `x`."""
    weight, of_weight = _parts(panels, outputs, x.shape[1], group)
    out = x.new_empty(x.shape[0], outputs)
    if not x.shape[0]:
        return out
    codes, scales = _quantized(x, group)
    if group:
        few = x.shape[0] <= FEW_ROWS
        rows, columns = (FEW_ROWS, FEW_COLUMNS) if few else (COLUMNS, COLUMNS)
        grid = triton.cdiv(x.shape[0], rows), triton.cdiv(outputs, columns)
        launch(
            _int4_kernel, grid, codes, scales, weight, of_weight, out, *out.shape, len(codes), GROUP=group,
            BLOCK_M=rows, BLOCK_N=columns, num_warps=4 if few else 8, num_stages=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out
    sums = torch._int_mm(codes[0], weight.T)
    grid = triton.cdiv(x.shape[0], 8), triton.cdiv(outputs, 256)
    launch(_scale_kernel, grid, sums, scales, of_weight, out, *out.shape, sums.shape[1], BLOCK_M=8, BLOCK_N=256)
    return out


def _quantized(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """8-bit codes `[groups, rows, group]`, without groups padded `[1, rows, in]`, and the scales `[groups, rows]`."""
    rows, depth = x.shape
    shape = (depth // group, rows, group) if group else (1, max(rows, FEWEST_ROWS), _padded(depth))
    codes = x.new_empty(shape, dtype=torch.int8)
    scales = x.new_empty(shape[0], rows, dtype=torch.float32)
    _quantize(x, codes, scales)
    return codes, scales


def _quantize(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Writes codes `[groups, rows, group]`, with zeros beyond those of `x`, and scales `[groups, rows]`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, depth), groups = x.shape, len(codes)
    width = depth // groups
    if codes.shape[1:] != (rows, width):
        codes.zero_()
    block = triton.next_power_of_2(width)
    lines = max(1, TILE // block)
    launch(
        _quantize_kernel, (triton.cdiv(rows * groups, lines),), x, codes, scales, rows * groups, groups, x.stride(0),
        codes.stride(0), codes.stride(1), rows, WIDTH=width, LINES=lines, BLOCK=block,
        num_warps=min(16, max(4, block // 1024)), enable_fp_fusion=False,
    )  # fmt: skip


def _padded(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE
