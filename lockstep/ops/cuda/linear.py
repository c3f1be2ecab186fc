"""The row-invariant matrix product in Triton.

An element is summed along K in a fixed order: K is split into the requested number of pieces, or `pieces_of(K, N)`;
each is one chain of tensor-core steps in ascending order, and the pieces' float32 sums are joined in one binary tree.
With few rows, a program computes one piece of one tile, so that the whole GPU reads weights (split-K); with many rows,
one program computes the same pieces in turn. Rows and columns of a tile never mix, so the tile's height and width
cannot change a bit as long as the hardware's steps along K are the same; this is checked on the device when a tile is
first requested for a shape, and a tile that disagrees is not used. The largest tile with enough tiles to fill the GPU
is the fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.ops.cuda.kernel import kernel, launch

MULTIPROCESSORS = 128
"""Number of programs that split-K aims for. A constant, since the number of pieces affects the bits."""
NARROWEST = 16
"""Columns of the narrowest tile."""
PIECES = (1, 2, 4, 8)
"""Numbers of pieces that K can be split into."""
PIECE_STEP = 256
"""Default pieces begin at multiples of this: every tile's BLOCK_K divides it."""


@dataclass(frozen=True)
class Tile:
    """Launch parameters of one product."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split: bool = False
    """Whether each piece of K is a separate program."""
    looped: bool = False
    """Whether the kernel is persistent: one program per multiprocessor, which computes one tile after the other."""


Tiles = tuple[Tile, ...]
# 64 rows are one tensor-core instruction of a Hopper warp group; fewer would be another instruction with other bits.
# The smallest comes first: the others are compared with it. Measured on an H100 (`benchmarks/NOTES.md`).
HALF_TILES: Tiles = (
    Tile(64, 16, 128, 4, 8, True),
    Tile(64, 32, 256, 4, 4, True),
    Tile(64, 64, 128, 4, 4, True),
    Tile(64, 128, 128, 4, 4, True),
    Tile(128, 64, 64, 8, 4),
    Tile(128, 64, 64, 4, 5),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 4),
    Tile(128, 256, 64, 8, 3, looped=True),
)
# float32 runs on CUDA cores, one multiply-add after the other.
FLOAT_TILES: Tiles = (Tile(32, 32, 32, 4, 2, True), Tile(64, 64, 32, 8, 2))
ENOUGH, ENOUGH_LOOPED = 96, 250
"""Numbers of tiles that keep the multiprocessors busy: a larger number of smaller tiles is slower."""
MOST_SUMS = 128
"""Most sums in a thread's registers."""
COMPARED = 4096
"""Most columns of the product on which tiles are compared."""
Multiply = Callable[[Tile, Tensor, Tensor, int], Tensor]


def pieces_of(in_features: int, out_features: int) -> int:
    """Default number of pieces of K, 1, 2 or 4: enough for a narrow product in decode to fill the GPU."""
    count = 1
    tiles = -(-out_features // NARROWEST)
    while count < 4 and tiles * count < MULTIPROCESSORS and in_features // (2 * count) >= PIECE_STEP:
        count *= 2
    return count


def default_pieces(in_features: int, out_features: int) -> tuple[int, int]:
    """The default number of pieces for a product's shape, and their length."""
    pieces = pieces_of(in_features, out_features)
    return pieces, triton.cdiv(triton.cdiv(in_features, pieces), PIECE_STEP) * PIECE_STEP


@kernel
def piece_sums(
    x, weight, rows, columns, row_mask, column_mask, first, last, K, COLUMN, INNER,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The float32 sums over K in [first, last), in ascending order; COLUMN and INNER are the weight's strides."""
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + inner
        left = tl.load(x + rows[:, None] * K + k[None, :], mask=row_mask[:, None] & (k < last)[None, :], other=0.0)
        right = tl.load(
            weight + columns[None, :] * COLUMN + k[:, None] * INNER,
            mask=column_mask[None, :] & (k < last)[:, None],
            other=0.0,
        )
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@kernel
def _two(
    x, weight, rows, columns, row_mask, column_mask, first, PIECE, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The joined sums of the piece at `first` and the next."""
    middle, last = tl.minimum(first + PIECE, K), tl.minimum(first + 2 * PIECE, K)
    left = piece_sums(
        x, weight, rows, columns, row_mask, column_mask, first, middle, K, K, 1, BLOCK_M, BLOCK_N, BLOCK_K
    )
    return left + piece_sums(
        x, weight, rows, columns, row_mask, column_mask, middle, last, K, K, 1, BLOCK_M, BLOCK_N, BLOCK_K
    )


@kernel
def _four(
    x, weight, rows, columns, row_mask, column_mask, first, PIECE, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    left = _two(x, weight, rows, columns, row_mask, column_mask, first, PIECE, K, BLOCK_M, BLOCK_N, BLOCK_K)
    middle = tl.minimum(first + 2 * PIECE, K)
    return left + _two(x, weight, rows, columns, row_mask, column_mask, middle, PIECE, K, BLOCK_M, BLOCK_N, BLOCK_K)


@kernel
def tile_sums(
    x, weight, rows, columns, row_mask, column_mask, PIECE, K,
    PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums of a tile over all of K: its pieces in turn, joined in their tree."""
    if PIECES == 1:
        sums = piece_sums(x, weight, rows, columns, row_mask, column_mask, 0, K, K, K, 1, BLOCK_M, BLOCK_N, BLOCK_K)
    elif PIECES == 2:
        sums = _two(x, weight, rows, columns, row_mask, column_mask, 0, PIECE, K, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        sums = _four(x, weight, rows, columns, row_mask, column_mask, 0, PIECE, K, BLOCK_M, BLOCK_N, BLOCK_K)
    if PIECES == 8:
        middle = tl.minimum(4 * PIECE, K)
        sums += _four(x, weight, rows, columns, row_mask, column_mask, middle, PIECE, K, BLOCK_M, BLOCK_N, BLOCK_K)
    return sums


@kernel
def tile_of(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The tile of rows and columns that a program computes: GROUP tiles of rows use a tile of columns before the next,
    so that its weights stay in the L2 cache."""
    group = program // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + (program % (GROUP * tiles_n)) % height
    tile_n = (program % (GROUP * tiles_n)) // height
    return tile_m, tile_n


@kernel
def _two_stored(partial, target, mask, size, piece):
    """The joined sums of two pieces stored by other programs."""
    left = tl.load(partial + piece * size + target, mask=mask, cache_modifier=".cg")
    return left + tl.load(partial + (piece + 1) * size + target, mask=mask, cache_modifier=".cg")


@kernel
def _four_stored(partial, target, mask, size, piece):
    return _two_stored(partial, target, mask, size, piece) + _two_stored(partial, target, mask, size, piece + 2)


@kernel(varying=("M",))
def _linear_kernel(
    x, weight, out, partial, arrivals, M, N, K, PIECE,
    PIECES: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program, piece = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_of(program, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask, column_mask = rows < M, columns < N
    mask = row_mask[:, None] & column_mask[None, :]
    target = rows[:, None] * N + columns[None, :]
    if SPLIT:
        first = piece * PIECE
        sums = piece_sums(
            x, weight, rows, columns, row_mask, column_mask, first, tl.minimum(first + PIECE, K), K, K, 1,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if PIECES > 1:
            size = M.to(tl.int64) * N
            tl.store(partial + piece * size + target, sums, mask=mask)
            # All threads store before the arrival, so every piece is stored when the last program arrives.
            tl.debug_barrier()
            before = tl.atomic_add(arrivals + program, 1, sem="acq_rel", scope="gpu")
            if before == PIECES - 1:
                tl.debug_barrier()
                if PIECES == 2:
                    sums = _two_stored(partial, target, mask, size, 0)
                else:
                    sums = _four_stored(partial, target, mask, size, 0)
                if PIECES == 8:
                    sums += _four_stored(partial, target, mask, size, 4)
                tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)
                # Reset for the next product.
                tl.atomic_xchg(arrivals + program, 0)
        else:
            tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)
    else:
        sums = tile_sums(x, weight, rows, columns, row_mask, column_mask, PIECE, K, PIECES, BLOCK_M, BLOCK_N, BLOCK_K)
        tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)


@kernel
def described_piece(
    x, weight, row, column, first, last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """`piece_sums` of tensor descriptors: the copy engine reads their tiles, and pads with zeros outside of them."""
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(first, last, BLOCK_K):
        sums = tl.dot(x.load([row, k]), weight.load([column, k]).T, sums)
    return sums


@kernel(varying=("M",))
def _described_kernel(
    x, weight, out, M, N, K, PIECE,
    PIECES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    if PIECES == 1:
        sums = described_piece(x, weight, row, column, 0, K, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        sums = described_piece(x, weight, row, column, 0, PIECE, BLOCK_M, BLOCK_N, BLOCK_K)
        sums += described_piece(x, weight, row, column, PIECE, K, BLOCK_M, BLOCK_N, BLOCK_K)
    rows, columns = (row + tl.arange(0, BLOCK_M)).to(tl.int64), column + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], sums.to(out.dtype.element_ty), mask=mask)


@kernel(varying=("M",))
def _looped_kernel(
    x, weight, out, M, N, K,
    PROGRAMS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """K in one piece. The first factors of the next tile are read while a tile is stored."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            left, right = x.load([tile_m * BLOCK_M, step * BLOCK_K]), weight.load([tile_n * BLOCK_N, step * BLOCK_K])
            sums = tl.dot(left, right.T, sums)
        out.store([tile_m * BLOCK_M, tile_n * BLOCK_N], sums.to(out.dtype))


def product_with(tile: Tile, x: Tensor, weight: Tensor, pieces: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """`x @ weight.T` with this tile: K in `pieces` equal pieces, or the default ones (0), rounded to `dtype`."""
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    out = x.new_empty(M, N, dtype=dtype or x.dtype)
    if not M:
        return out
    if pieces not in (0, *PIECES):
        raise ValueError(f"a product has {pieces} chunks, but on a GPU it can have {', '.join(map(str, PIECES))}")
    pieces, piece = (pieces, K // pieces) if pieces else default_pieces(K, N)
    programs = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n)
    if is_described(tile, x, pieces, piece):
        _product_described(tile, x, weight, out, pieces, piece, programs)
        return out
    partial = arrivals = None
    if tile.split and pieces > 1:
        partial = torch.empty(pieces, M, N, dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device, programs)
    launch(
        _linear_kernel, (programs, pieces if tile.split else 1),
        x, weight, out, partial, arrivals, M, N, K, piece,
        PIECES=pieces, SPLIT=tile.split, GROUP=8,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def is_described(tile: Tile, x: Tensor, pieces: int, piece: int) -> bool:
    """Whether the copy engine of Hopper and later reads this tile's factors, `x` and a weight of its width.

    Decided by shapes, not addresses, so that the comparison for a shape runs the same code as the product.
    """
    whole_steps = pieces == 1 or (pieces == 2 and piece % tile.block_k == 0)
    return not tile.split and whole_steps and x.shape[1] % 8 == 0 and has_copy_engine(x)


def has_copy_engine(x: Tensor) -> bool:
    """Whether `x` is on a GPU with a copy engine for tensor descriptors (TMA): Hopper and later."""
    return x.element_size() == 2 and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    """The descriptor of a row-major matrix, for tiles of this size. A descriptor must begin at a multiple of 16 bytes;
    other matrices are copied."""
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    # Not x.stride(), which is arbitrary for a single row.
    return TensorDescriptor(x, [*x.shape], [x.shape[1], 1], [*block])


def _product_described(
    tile: Tile, x: Tensor, weight: Tensor, out: Tensor, pieces: int, piece: int, programs: int
) -> None:
    (M, K), N = x.shape, weight.shape[0]
    left, right = descriptor(x, tile.block_m, tile.block_k), descriptor(weight, tile.block_n, tile.block_k)
    sizes = dict(GROUP=8, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k)
    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    if tile.looped and pieces == 1 and N % 8 == 0:
        target = descriptor(out, tile.block_m, tile.block_n)
        programs = min(programs, torch.cuda.get_device_properties(x.device).multi_processor_count)
        launch(_looped_kernel, (programs,), left, right, target, M, N, K, PROGRAMS=programs, **sizes, **options)
        return
    launch(_described_kernel, (programs,), left, right, out, M, N, K, piece, PIECES=pieces, **sizes, **options)


_counters: dict[torch.device, list[Tensor]] = {}


def _arrivals(device: torch.device, programs: int) -> Tensor:
    """Counters that every product resets to zero. Products on one device run one at a time, on one stream."""
    counters = _counters.setdefault(device, [])
    if not counters or counters[-1].numel() < programs:
        # Outgrown ones stay allocated: captured graphs still use them.
        counters.append(torch.zeros(max(programs, 1 << 16), dtype=torch.int32, device=device))
    return counters[-1]


def product(x: Tensor, weight: Tensor, pieces: int, dtype: torch.dtype) -> Tensor:
    """`x @ weight.T`, rounded to `dtype`: the bits of a row are the same for every number of rows.

    K is split into `pieces`, or with 0 into the default ones. Raises ValueError above 8.
    """
    tile = fitting(x.dtype, x.device, x.shape[0], weight.shape[1], weight.shape[0], pieces)
    return product_with(tile, x, weight, pieces, dtype)


@lru_cache(maxsize=4096)
def fitting(
    dtype: torch.dtype, device: torch.device, rows: int, in_features: int, out_features: int, pieces: int
) -> Tile:
    tiles = FLOAT_TILES if dtype == torch.float32 else HALF_TILES
    return largest(
        tiles,
        lambda tile: agrees(tile, tiles[0], dtype, device, in_features, out_features, pieces),
        rows,
        out_features,
        pieces or pieces_of(in_features, out_features),
    )


def largest(
    tiles: Tiles, agrees: Callable[[Tile], bool], rows: int, columns: int, pieces: int, groups: int = 1
) -> Tile:
    """The largest tile for a product of `groups` times `rows` rows with enough tiles to fill the GPU."""

    def fits(tile: Tile) -> bool:
        if rows <= tile.block_m // 2 and tile.block_m > tiles[0].block_m:
            return False
        together = 1 if tile.split else min(pieces, 3)
        if together * tile.block_m * tile.block_n > 32 * tile.warps * MOST_SUMS:
            return False
        count = groups * triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n)
        return count * (pieces if tile.split else 1) >= (ENOUGH_LOOPED if tile.looped else ENOUGH)

    return next((tile for tile in reversed(tiles[1:]) if fits(tile) and agrees(tile)), tiles[0])


@cache
def agrees(
    tile: Tile,
    base: Tile,
    dtype: torch.dtype,
    device: torch.device,
    in_features: int,
    out_features: int,
    pieces: int = 0,
    multiply: Multiply | None = None,
) -> bool:
    """Whether `multiply` with this tile gives the bits of `product_with` with another one, for this shape.

    `multiply` has the arguments and result of `product_with`, which is the default.
    """
    alone = (pieces or pieces_of(in_features, out_features)) == 1
    if alone and out_features > COMPARED:
        out_features = COMPARED + out_features % 8
    generator = torch.Generator(device).manual_seed(in_features * 1_000_003 + out_features)
    # Large enough that a program that computes several tiles has more than one.
    rows = (20 if tile.looped else 2) * tile.block_m - 3
    x, weight = (t.to(dtype) for t in cancelling(generator, rows, in_features, out_features))
    expected = product_with(base, x, weight, pieces)
    try:
        return torch.equal((multiply or product_with)(tile, x, weight, pieces), expected)
    except OutOfResources:  # this GPU has too little shared memory for it
        return False


def cancelling(generator: torch.Generator, rows: int, inner: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Factors whose exact products are near 0, so that the sums consist of rounding errors.

    With ordinary data, the last bits of a sum are rounded away, and two orders of summation can give equal results.
    """
    device, half = generator.device, inner // 2
    scale = torch.exp2(torch.randint(-6, 7, (half,), generator=generator, device=device).float())
    x = torch.randn(rows, half, generator=generator, device=device) * scale
    weight = torch.randn(outputs, half, generator=generator, device=device)
    order = torch.randperm(2 * half, generator=generator, device=device)
    tail = inner % 2  # 0 or 1 columns of zeros
    x, weight = torch.cat([x, -x], 1)[:, order], torch.cat([weight, weight], 1)[:, order]
    return torch.nn.functional.pad(x, (0, tail)), torch.nn.functional.pad(weight, (0, tail))
