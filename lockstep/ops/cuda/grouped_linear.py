"""The row-invariant product of grouped rows, each group with a separate weight, in Triton.

A tile only has rows of one group, and its sums are those of a dense product's piece (`linear.piece_sums`): a row's bits
are those of the dense product of that row with its group's weight, with K in one piece, for any sizes of the groups.
The groups fill the GPU without split-K. Their starts are read on the device, without synchronizing, so a CUDA graph can
capture the product: it launches a program for every possible tile, and those without one return at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda import linear
from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.cuda.linear import Tile, Tiles, described_piece, piece_sums, tile_of


@kernel
def _rows_of(tile, starts, GROUPS, LANES: tl.constexpr, BLOCK_M: tl.constexpr):
    """The group of a tile, its first row and the group's end; GROUPS if there is no such tile."""
    # Tiles are in the order of the groups, like rows.
    lanes = tl.arange(0, LANES)
    first = tl.load(starts + lanes, mask=lanes < GROUPS, other=0)
    stop = tl.load(starts + lanes + 1, mask=lanes < GROUPS, other=0)
    tiles = tl.cdiv(stop - first, BLOCK_M).to(tl.int32)
    passed = (tl.cumsum(tiles, 0) <= tile) & (lanes < GROUPS)
    group = tl.sum(passed.to(tl.int32), 0)
    before = tl.sum(tl.where(passed, tiles, 0), 0)
    begin = tl.load(starts + group) + (tile - before) * BLOCK_M
    return group, begin, tl.load(starts + group + 1, mask=group < GROUPS, other=0)


@kernel(varying=("TILES", "GROUPS"))
def _grouped_kernel(
    x, weight, out, starts, TILES, GROUPS, N, K, MATRIX, COLUMN, INNER,
    LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), TILES, tl.cdiv(N, BLOCK_N), GROUP)
    group, begin, end = _rows_of(tile_m, starts, GROUPS, LANES, BLOCK_M)
    if group >= GROUPS:
        return
    rows = tl.arange(0, BLOCK_M)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask, column_mask = rows < end - begin, columns < N
    sums = piece_sums(
        x + begin * K, weight + group.to(tl.int64) * MATRIX, rows, columns, row_mask, column_mask, 0, K, K, COLUMN,
        INNER, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    target = rows[:, None] * N + columns[None, :]
    tl.store(out + begin * N + target, sums.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@kernel(varying=("TILES", "GROUPS"))
def _described_kernel(
    x, weight, out, starts, TILES, GROUPS, N, K,
    LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`_grouped_kernel` with factors read by the copy engine, the weights of all groups as one matrix. Rows and columns
    that it reads of the next group are not stored."""
    tile_m, tile_n = tile_of(tl.program_id(0), TILES, tl.cdiv(N, BLOCK_N), GROUP)
    group, begin, end = _rows_of(tile_m, starts, GROUPS, LANES, BLOCK_M)
    if group >= GROUPS:
        return
    row, column = begin.to(tl.int32), group * N + tile_n * BLOCK_N
    sums = described_piece(x, weight, row, column, 0, K, BLOCK_M, BLOCK_N, BLOCK_K)
    rows, columns = begin + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], sums.to(out.dtype.element_ty), mask=mask)


HALF_TILES: Tiles = (
    Tile(64, 16, 128, 4, 8),
    Tile(64, 32, 256, 4, 4),
    Tile(64, 64, 128, 4, 4),
    Tile(128, 64, 64, 8, 4),
    Tile(64, 128, 128, 4, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(256, 128, 64, 8, 3),
)
"""As in `linear`. Measured on an H100 (`benchmarks/NOTES.md`)."""
DECODE_ROWS = HALF_TILES[0].block_m


def product(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Rows `starts[g]` to `starts[g + 1]` of `x`, times `weight[g].T`; `starts` may also be on the CPU.

    `weight` may have any strides: a gradient uses its transpose.
    """
    groups, outputs, depth = weight.shape
    # Assumes that all groups that can have rows have equally many: this only chooses a tile, which changes no bit.
    groups = max(1, min(groups, x.shape[0]))
    rows = triton.cdiv(x.shape[0], groups)
    tile = _fitting(x.dtype, x.device, rows, groups, depth, outputs, weight.is_contiguous())
    return product_with(tile, x, weight, starts)


@lru_cache(maxsize=4096)
def _fitting(
    dtype: torch.dtype, device: torch.device, rows: int, groups: int, in_features: int, out_features: int,
    contiguous: bool,
) -> Tile:  # fmt: skip
    floats = dtype == torch.float32
    multiply = _in_groups if contiguous else _in_strided_groups
    dense = (linear.FLOAT_TILES if floats else linear.HALF_TILES)[0]
    return linear.largest(
        tuple(replace(tile, split=False) for tile in linear.FLOAT_TILES) if floats else HALF_TILES,
        lambda tile: linear.agrees(tile, dense, dtype, device, in_features, out_features, 1, multiply),
        rows,
        out_features,
        1,
        groups,
    )


def product_with(tile: Tile, x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """`product` with this tile."""
    x, starts = x.contiguous(), starts.to(x.device, non_blocking=True)
    (rows, K), (groups, N, _) = x.shape, weight.shape
    out = x.new_empty(rows, N)
    if not rows:
        return out
    # A group's last tile may have only one row.
    tiles = (rows + min(groups, rows) * (tile.block_m - 1)) // tile.block_m
    grid = (tiles * triton.cdiv(N, tile.block_n),)
    options = dict(
        # A lane for every thread: the compiler lowers scans of fewer elements differently.
        LANES=max(triton.next_power_of_2(groups), 32 * tile.warps), GROUP=8,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    # In decode, most rows of a tile are masked: loads by pointer skip them, the copy engine does not.
    if tile.block_m > DECODE_ROWS and linear.is_described(tile, x, 1, K) and weight.is_contiguous():
        left = linear.descriptor(x, tile.block_m, tile.block_k)
        right = linear.descriptor(weight.view(-1, K), tile.block_n, tile.block_k)
        launch(_described_kernel, grid, left, right, out, starts, tiles, groups, N, K, **options)
        return out
    launch(
        _grouped_kernel, grid, x, weight, out, starts, tiles, groups, N, K, *weight.stride(), **options,
    )  # fmt: skip
    return out


def _in_groups(tile: Tile, x: Tensor, weight: Tensor, pieces: int) -> Tensor:
    """A dense product as a grouped one: four groups with the same weight, one of them empty and one with one row."""
    return _in_strided_groups(tile, x, weight, pieces, contiguous=True)


def _in_strided_groups(tile: Tile, x: Tensor, weight: Tensor, pieces: int, contiguous: bool = False) -> Tensor:
    starts, weights = torch.tensor([0, 1, 1, len(x) // 3, len(x)]), weight.expand(4, *weight.shape)
    return product_with(tile, x, weights.contiguous() if contiguous else weights, starts)


def has_library(grad: Tensor, other: Tensor) -> bool:
    """Whether torch computes these gradients group by group without synchronizing with the CPU: `grad` and the weight
    or the other rows, contiguous, at multiples of 16 bytes. It refuses a single row, whose strides can be anything.
    """
    wide = all(x.shape[-1] % 8 == 0 and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (grad, other))
    return grad.dtype == torch.bfloat16 and len(grad) > 1 and wide and linear.has_copy_engine(grad)


def input_gradient(grad: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """`grad[starts[g]:starts[g + 1]] @ weight[g]`."""
    return F.grouped_mm(grad, weight, offs=_ends(grad, starts))


def weight_gradient(grad: Tensor, x: Tensor, starts: Tensor) -> Tensor:
    """`grad[starts[g]:starts[g + 1]].T @ x[starts[g]:starts[g + 1]]`."""
    return F.grouped_mm(grad.T, x, offs=_ends(grad, starts))


def _ends(grad: Tensor, starts: Tensor) -> Tensor:
    return starts[1:].to(grad.device, torch.int32, non_blocking=True)
