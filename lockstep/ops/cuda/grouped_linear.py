"""The row-invariant product of grouped rows, each group with its own weight, in Triton.

A tile only has rows of one group, and its sums are those of `linear.tile_sums`, which computes the tiles of a dense
product: a row's bits are those of `linear` of that row with its group's weight, whatever the groups' sizes. Where the
groups start is read on the device, so that nothing synchronizes with it and a CUDA graph can record the product: there
are as many programs as there can be tiles, and those without one return at once. Pieces of K have no separate programs,
since the groups fill the GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda import linear
from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.cuda.linear import Tile, Tiles, tile_of, tile_sums


@kernel(varying=("TILES", "GROUPS"))
def _grouped_kernel(
    x, weight, out, starts, TILES, GROUPS, N, K, PIECE, MATRIX, COLUMN, INNER,
    PIECES: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), TILES, tl.cdiv(N, BLOCK_N), GROUP)
    # Groups follow each other in tiles as they do in rows.
    lanes = tl.arange(0, LANES)
    first = tl.load(starts + lanes, mask=lanes < GROUPS, other=0)
    stop = tl.load(starts + lanes + 1, mask=lanes < GROUPS, other=0)
    tiles = tl.cdiv(stop - first, BLOCK_M).to(tl.int32)
    ends = tl.cumsum(tiles, 0)
    if tile_m >= tl.sum(tiles, 0):
        return
    group = tl.sum((ends <= tile_m).to(tl.int32), 0)
    before = tl.sum(tl.where(ends <= tile_m, tiles, 0), 0)
    begin = tl.load(starts + group) + (tile_m - before) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask, column_mask = rows < tl.load(starts + group + 1) - begin, columns < N
    sums = tile_sums(
        x + begin * K, weight + group.to(tl.int64) * MATRIX, rows, columns, row_mask, column_mask, PIECE, K, COLUMN,
        INNER, PIECES, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    target = rows[:, None] * N + columns[None, :]
    tl.store(out + begin * N + target, sums.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


HALF_TILES: Tiles = (
    Tile(64, 16, 128, 4, 8),
    Tile(64, 32, 256, 4, 4),
    Tile(64, 64, 128, 4, 4),
    Tile(128, 64, 64, 8, 4),
    Tile(64, 128, 128, 4, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(256, 128, 64, 8, 3),
)
"""As those of `linear`. Measured on an H100 (`benchmarks/NOTES.md`)."""


def product(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Rows `starts[g]` to `starts[g + 1]` of `x`, times `weight[g].T`; `starts` may also be on the CPU.

    `weight` may have any strides: a gradient takes the transposed one.
    """
    groups, outputs, depth = weight.shape
    # As if all groups that can have rows had equally many: this only chooses a tile, which changes no bit.
    groups = max(1, min(groups, x.shape[0]))
    return product_with(
        _fitting(x.dtype, x.device, triton.cdiv(x.shape[0], groups), groups, depth, outputs), x, weight, starts
    )


@lru_cache(maxsize=4096)
def _fitting(
    dtype: torch.dtype, device: torch.device, rows: int, groups: int, in_features: int, out_features: int
) -> Tile:
    floats = dtype == torch.float32
    dense = (linear.FLOAT_TILES if floats else linear.HALF_TILES)[0]
    return linear.largest(
        tuple(replace(tile, split=False) for tile in linear.FLOAT_TILES) if floats else HALF_TILES,
        lambda tile: linear.agrees(tile, dense, dtype, device, in_features, out_features, multiply=_in_groups),
        rows,
        out_features,
        linear.pieces_of(in_features, out_features),
        groups,
    )


def product_with(tile: Tile, x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """`product` with this tile."""
    x, starts = x.contiguous(), starts.to(x.device, non_blocking=True)
    (rows, K), (groups, N, _) = x.shape, weight.shape
    out = x.new_empty(rows, N)
    if not rows:
        return out
    pieces, piece = linear.own_pieces(K, N)
    # A group's last tile may have only one row.
    tiles = (rows + min(groups, rows) * (tile.block_m - 1)) // tile.block_m
    launch(
        _grouped_kernel, (tiles * triton.cdiv(N, tile.block_n),),
        x, weight, out, starts, tiles, groups, N, K, piece, *weight.stride(),
        # Every thread has a lane: scans of fewer elements are another path of the compiler's.
        PIECES=pieces, LANES=max(triton.next_power_of_2(groups), 32 * tile.warps), GROUP=8,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _in_groups(tile: Tile, x: Tensor, weight: Tensor, pieces: int) -> Tensor:
    """A dense product as a grouped one: four groups with the same weight, one empty and one with a single row."""
    starts = torch.tensor([0, 1, 1, len(x) // 3, len(x)])
    return product_with(tile, x, weight.expand(4, *weight.shape), starts)
