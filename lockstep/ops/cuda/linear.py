"""The row-invariant matrix product in Triton.

An element is summed along K in a fixed order: K is cut into `chunks(K, N)` pieces, each piece is one chain of
tensor-core steps in ascending order, and the pieces' float32 sums meet in one binary tree. With few rows a program
computes one piece of one tile, so that all of the GPU reads weights (split-K); with many rows one program computes
the same pieces one after the other. Rows and columns of a tile never mix, so the tile's height and width cannot
change a bit as long as the hardware's steps along K are the same ones; that is checked on the device at the first
use of a shape, and a tile that disagrees is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.available import library
from lockstep.ops.cuda.kernel import kernel

MULTIPROCESSORS = 128
"""What split-K fills. A constant: the number of pieces is part of the arithmetic, so it cannot follow the device."""
NARROWEST = 16
"""Columns of the narrowest tile."""
PIECE_STEP = 256
"""Pieces of K begin at multiples of this: every tile's BLOCK_K divides it."""


@dataclass(frozen=True)
class Tile:
    """Launch parameters of one product."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split: bool
    """Each piece of K in a program of its own."""


# 64 rows are one tensor-core instruction of a Hopper warp group; fewer would be another instruction with other bits.
# (most rows, tile); the first is the one that the others are compared with.
HALF_TILES = (
    (16, Tile(64, 16, 256, 4, 4, True)),
    (128, Tile(64, 64, 128, 4, 4, True)),
    (None, Tile(128, 128, 64, 8, 4, False)),
)
# float32 runs on the ordinary cores, one multiply-add after the other.
FLOAT_TILES = ((64, Tile(32, 32, 32, 4, 2, True)), (None, Tile(64, 64, 32, 8, 2, False)))
Tiles = tuple[tuple[int | None, Tile], ...]


def chunks(in_features: int, out_features: int) -> int:
    """Pieces that K is cut into, 1, 2 or 4: enough that a narrow product in decode fills the GPU."""
    count = 1
    tiles = -(-out_features // NARROWEST)
    while count < 4 and tiles * count < MULTIPROCESSORS and in_features // (2 * count) >= PIECE_STEP:
        count *= 2
    return count


@kernel
def _piece(
    x, weight, rows, columns, row_mask, column_mask, first, last, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The float32 sums over K in [first, last), in ascending order."""
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + inner
        left = tl.load(x + rows[:, None] * K + k[None, :], mask=row_mask[:, None] & (k < last)[None, :], other=0.0)
        right = tl.load(
            weight + columns[None, :] * K + k[:, None], mask=column_mask[None, :] & (k < last)[:, None], other=0.0
        )
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@kernel(varying=("M",))
def _linear_kernel(
    x, weight, out, partial, arrivals, M, N, K, PIECE,
    PIECES: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # GROUP tiles of rows share a tile of columns before the next: its weights stay in the second-level cache.
    program, piece = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = program // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + (program % (GROUP * tiles_n)) % height
    tile_n = (program % (GROUP * tiles_n)) // height
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask, column_mask = rows < M, columns < N
    mask = row_mask[:, None] & column_mask[None, :]
    target = rows[:, None] * N + columns[None, :]
    if SPLIT:
        first = piece * PIECE
        sums = _piece(
            x, weight, rows, columns, row_mask, column_mask, first, tl.minimum(first + PIECE, K), K,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if PIECES > 1:
            size = M.to(tl.int64) * N
            tl.store(partial + piece * size + target, sums, mask=mask)
            # All threads' stores come before the arrival; whoever arrives last finds every piece stored.
            tl.debug_barrier()
            before = tl.atomic_add(arrivals + program, 1, sem="acq_rel", scope="gpu")
            if before == PIECES - 1:
                tl.debug_barrier()
                sums = tl.load(partial + target, mask=mask, cache_modifier=".cg") + tl.load(
                    partial + size + target, mask=mask, cache_modifier=".cg"
                )
                if PIECES == 4:
                    sums += tl.load(partial + 2 * size + target, mask=mask, cache_modifier=".cg") + tl.load(
                        partial + 3 * size + target, mask=mask, cache_modifier=".cg"
                    )
                tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)
                # Ready for the next product.
                tl.atomic_xchg(arrivals + program, 0)
        else:
            tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)
    else:
        sums = _piece(
            x, weight, rows, columns, row_mask, column_mask, 0, tl.minimum(PIECE, K), K, BLOCK_M, BLOCK_N, BLOCK_K
        )
        if PIECES >= 2:
            sums += _piece(
                x, weight, rows, columns, row_mask, column_mask, PIECE, tl.minimum(2 * PIECE, K), K,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if PIECES == 4:
            right = _piece(
                x, weight, rows, columns, row_mask, column_mask, 2 * PIECE, tl.minimum(3 * PIECE, K), K,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            right += _piece(
                x, weight, rows, columns, row_mask, column_mask, 3 * PIECE, tl.minimum(4 * PIECE, K), K,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            sums += right
        tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)


def product_with(tile: Tile, x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` with this tile."""
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    out = x.new_empty(M, N)
    if not M:
        return out
    pieces = chunks(K, N)
    piece = triton.cdiv(triton.cdiv(K, pieces), PIECE_STEP) * PIECE_STEP
    programs = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n)
    meeting = tile.split and pieces > 1
    partial = torch.empty((pieces, M, N) if meeting else 0, dtype=torch.float32, device=x.device)
    arrivals = _arrivals(x.device, programs) if meeting else partial
    _linear_kernel[(programs, pieces if tile.split else 1)](
        x, weight, out, partial, arrivals, M, N, K, piece,
        PIECES=pieces, SPLIT=tile.split, GROUP=8,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


_counters: dict[torch.device, list[Tensor]] = {}


def _arrivals(device: torch.device, programs: int) -> Tensor:
    """Zeros that every product leaves as zeros. Products of one device run one after the other: on one stream."""
    counters = _counters.setdefault(device, [])
    if not counters or counters[-1].numel() < programs:
        # The outgrown ones are kept: captured graphs go on using them.
        counters.append(torch.zeros(max(programs, 1 << 16), dtype=torch.int32, device=device))
    return counters[-1]


@library.operator(
    "linear(Tensor x, Tensor weight) -> Tensor", fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0])
)
def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`: the bits of a row are the same for every number of rows."""
    rows = x.shape[0]
    for most, tile in _tiles(x.dtype, x.device, weight.shape[1], weight.shape[0]):
        if most is None or rows <= most:
            return product_with(tile, x, weight)
    raise AssertionError("the last tile takes any number of rows")


@cache
def _tiles(dtype: torch.dtype, device: torch.device, in_features: int, out_features: int) -> Tiles:
    candidates: Tiles = FLOAT_TILES if dtype == torch.float32 else HALF_TILES
    return agreeing(candidates, dtype, device, in_features, out_features)


def agreeing(candidates: Tiles, dtype: torch.dtype, device: torch.device, in_features: int, out_features: int) -> Tiles:
    """The candidates whose bits equal the first one's for this shape; where one differs, a lower one takes its rows."""
    out_features = min(out_features, 4096) if chunks(in_features, out_features) == 1 else out_features
    generator = torch.Generator().manual_seed(in_features * 1_000_003 + out_features)
    rows = 2 * max(tile.block_m for _, tile in candidates) - 3
    x, weight = (t.to(device, dtype) for t in _cancelling(generator, rows, in_features, out_features))
    expected = product_with(candidates[0][1], x, weight)
    same = [c for c in candidates if torch.equal(product_with(c[1], x, weight), expected)]
    return (*same[:-1], (None, same[-1][1]))


def _cancelling(generator: torch.Generator, rows: int, inner: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Factors whose exact products are near 0, so that what is left is how each partial sum was rounded.

    Of ordinary data the last bits of a sum are rounded away, and two orders of summation can look like one.
    """
    scale = torch.exp2(torch.randint(-6, 7, (inner // 2,), generator=generator).float())
    x = torch.randn(rows, inner // 2, generator=generator) * scale
    weight = torch.randn(outputs, inner // 2, generator=generator)
    order = torch.randperm(2 * (inner // 2), generator=generator)
    tail = inner % 2  # 0 or 1 columns of zeros
    x, weight = torch.cat([x, -x], 1)[:, order], torch.cat([weight, weight], 1)[:, order]
    return torch.nn.functional.pad(x, (0, tail)), torch.nn.functional.pad(weight, (0, tail))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The library's products: a gradient's bits need not be row-invariant."""
    x, weight = ctx.saved_tensors
    grad = grad.contiguous()
    return grad @ weight, grad.T @ x


library.differentiable("linear", _save, _backward)
