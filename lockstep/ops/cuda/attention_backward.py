"""The gradient of packed causal attention in Triton, recomputed from the saved log-sums (arXiv 2205.14135).

Query rows come in pieces, each the last rows of its context; with whole sequences, a piece is its context. Two kernels
without atomic additions: one iterates over the keys of a tile of queries, the other over the queries that see a tile of
keys, one head of the group after the other. So a gradient's bits are the same in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.attention_reference import Terms
from lockstep.ops.cuda import attention
from lockstep.ops.cuda.attention import heavy_first, tile_map
from lockstep.ops.cuda.kernel import kernel, launch

LOG2_E = tl.constexpr(attention.LOG2_E)


class Launch(NamedTuple):
    """Tile sizes of one of the two kernels."""

    tile: int
    """Rows whose gradients a program computes."""
    step: int
    """Rows on the other side that it reads at a time."""
    warps: int
    stages: int


# Measured on an H100 (`benchmarks/NOTES.md`).
QUERIES, KEYS = Launch(128, 64, 8, 3), Launch(64, 32, 4, 3)
KEYS_NARROW = Launch(64, 64, 4, 3)
"""For at most 64 features, whose sums leave registers for more queries."""
# For more than 128 features, and for float32: their sums in registers, and tiles in shared memory, have the same size.
QUERIES_WIDE, KEYS_WIDE = Launch(32, 32, 4, 2), Launch(32, 32, 8, 2)
LARGEST = Launch(16, 16, 4, 1)
"""For both together, so that they fit into 99 KiB, and no sum into memory (docs/gpu.md)."""


@kernel(varying=("lines",))
def _deltas_kernel(grad_out, out, deltas, lines, DIM: tl.constexpr, BLOCK_D: tl.constexpr, LINES: tl.constexpr):
    """Σ gradient · output of each row and head."""
    line, d = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES), tl.arange(0, BLOCK_D)
    place, mask = line[:, None] * DIM + d[None, :], (line < lines)[:, None] & (d < DIM)[None, :]
    grad = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(grad * tl.load(out + place, mask=mask, other=0.0).to(tl.float32), 1)
    tl.store(deltas + line, total, mask=line < lines)


@kernel
def _step_of_queries(
    query, grad, log_sum, delta, sums, k, v, other, token, shift, keys_end, kv_head, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the keys in rows `other` to the gradients of queries. Without MASKED, every query sees
    them all."""
    d = tl.arange(0, BLOCK_D)
    source, present = (other.to(tl.int64) * KV_HEADS + kv_head)[:, None] * DIM + d[None, :], (d < DIM)[None, :]
    if MASKED:
        present &= (other < keys_end)[:, None]
    key, value = tl.load(k + source, mask=present, other=0.0), tl.load(v + source, mask=present, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    weights = tl.exp2(scores * (scale * LOG2_E) - log_sum[:, None])
    if MASKED:
        seen = (other[None, :] <= token[:, None] + shift) & (other < keys_end)[None, :]
        if WINDOW > 0:
            seen &= other[None, :] > token[:, None] + shift - WINDOW
        weights = tl.where(seen, weights, 0.0)
    grad_weights = tl.dot(grad, tl.trans(value), input_precision="ieee")
    grad_scores = weights * (grad_weights - delta[:, None])
    return tl.dot(grad_scores.to(key.dtype), key, sums, input_precision="ieee")


@kernel
def _queries_kernel(
    grad_out, q, k, v, log_sums, deltas, grad_q, starts, contexts, first_keys, tile_pieces, tile_rows, pieces, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    tile, head = heavy_first(HEADS)
    piece = tl.load(tile_pieces + tile)
    if piece >= pieces:
        return
    kv_head = head // (HEADS // KV_HEADS)
    first, end = tl.load(tile_rows + tile), tl.load(starts + piece + 1)
    begin = tl.load(first_keys + piece)
    keys_end = begin + tl.load(contexts + piece)
    shift = keys_end - end  # from a query's row to the row of the key at its position
    token, d = first + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    line = token.to(tl.int64) * HEADS + head
    place, mask = line[:, None] * DIM + d[None, :], (token < end)[:, None] & (d < DIM)[None, :]
    query, grad = tl.load(q + place, mask=mask, other=0.0), tl.load(grad_out + place, mask=mask, other=0.0)
    log_sum = tl.load(log_sums + line, mask=token < end, other=float("inf")) * LOG2_E
    delta = tl.load(deltas + line, mask=token < end, other=0.0)
    sums = tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
    masked_from = begin
    if WINDOW > 0:
        masked_from += tl.maximum(first + shift + 1 - WINDOW - begin, 0) // STEP * STEP
    else:
        # All rows see the keys up to the first row's position.
        masked_from += tl.maximum(first + shift + 1 - begin, 0) // STEP * STEP
        for start in range(begin, masked_from, STEP):
            sums = _step_of_queries(
                query, grad, log_sum, delta, sums, k, v, start + tl.arange(0, STEP), token, shift, keys_end, kv_head,
                scale, KV_HEADS, DIM, BLOCK_D, WINDOW, False,
            )  # fmt: skip
    for start in range(masked_from, tl.minimum(first + TILE, end) + shift, STEP):
        sums = _step_of_queries(
            query, grad, log_sum, delta, sums, k, v, start + tl.arange(0, STEP), token, shift, keys_end, kv_head,
            scale, KV_HEADS, DIM, BLOCK_D, WINDOW, True,
        )  # fmt: skip
    tl.store(grad_q + place, (sums * scale).to(grad_q.dtype.element_ty), mask=mask)


@kernel
def _step_of_keys(
    key, value, key_sums, value_sums, grad_out, q, log_sums, deltas, last_keys, other, queries_end, token, head, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the queries in rows `other` to the gradients of keys and values. Without MASKED, every
    query sees all the keys."""
    d, inside = tl.arange(0, BLOCK_D), other < queries_end
    line = other.to(tl.int64) * HEADS + head
    source, present = line[:, None] * DIM + d[None, :], (d < DIM)[None, :]
    if MASKED:
        present &= inside[:, None]
        log_sum = tl.load(log_sums + line, mask=inside, other=float("inf")) * LOG2_E
        delta = tl.load(deltas + line, mask=inside, other=0.0)
    else:
        log_sum, delta = tl.load(log_sums + line) * LOG2_E, tl.load(deltas + line)
    query, grad = tl.load(q + source, mask=present, other=0.0), tl.load(grad_out + source, mask=present, other=0.0)
    # Keys by queries, as both gradients are products with this matrix on the left.
    scores = tl.dot(key, tl.trans(query), input_precision="ieee")
    weights = tl.exp2(scores * (scale * LOG2_E) - log_sum[None, :])
    if MASKED:
        last = other if WHOLE else tl.load(last_keys + other, mask=inside, other=0)
        seen = (token[:, None] <= last[None, :]) & inside[None, :]
        if WINDOW > 0:
            seen &= token[:, None] > last[None, :] - WINDOW
        weights = tl.where(seen, weights, 0.0)
    value_sums = tl.dot(weights.to(grad.dtype), grad, value_sums, input_precision="ieee")
    grad_weights = tl.dot(value, tl.trans(grad), input_precision="ieee")
    grad_scores = weights * (grad_weights - delta[None, :])
    return tl.dot(grad_scores.to(query.dtype), query, key_sums, input_precision="ieee"), value_sums


@kernel
def _keys_kernel(
    grad_out, q, k, v, log_sums, deltas, grad_k, grad_v, starts, tile_sequences, tile_rows, sequences, scale, last_keys,
    first_queries, last_queries, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS  # the first tiles have the most queries
    sequence = tl.load(tile_sequences + tile)
    if sequence >= sequences:
        return
    first, end = tl.load(tile_rows + tile), tl.load(starts + sequence + 1)
    token, d = first + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    place = (token.to(tl.int64) * KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
    mask = (token < end)[:, None] & (d < DIM)[None, :]
    key, value = tl.load(k + place, mask=mask, other=0.0), tl.load(v + place, mask=mask, other=0.0)
    key_sums, value_sums = tl.zeros((TILE, BLOCK_D), dtype=tl.float32), tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
    # The queries that see part of the tile: with whole sequences, all from its first row on.
    if WHOLE:
        queries_begin, queries_end = first, end
        if WINDOW > 0:
            queries_end = tl.minimum(end, first + TILE - 1 + WINDOW)
    else:
        queries_begin, queries_end = tl.load(first_queries + tile), tl.load(last_queries + tile)
    # The queries after the tile see all of its keys; `full` of their steps have no row past the end. Divisors are 1 for
    # a loop without steps: the compiler hoists divisions out of the loop, and infers from an undefined division by zero
    # that there are steps (observed on an H100: rows past the end were read).
    full = 0
    if WHOLE and WINDOW == 0:
        full = tl.maximum(queries_end - queries_begin - TILE, 0) // STEP
        divisor = tl.maximum(full, 1)
        for step in range(0, GROUP * full):
            other = queries_begin + TILE + (step % divisor) * STEP + tl.arange(0, STEP)
            key_sums, value_sums = _step_of_keys(
                key, value, key_sums, value_sums, grad_out, q, log_sums, deltas, last_keys, other, queries_end, token,
                kv_head * GROUP + step // divisor, scale, HEADS, DIM, BLOCK_D, WINDOW, WHOLE, False,
            )  # fmt: skip
    rest = tl.cdiv(queries_end - queries_begin, STEP) - full
    divisor = tl.maximum(rest, 1)
    for step in range(0, GROUP * rest):
        index = step % divisor
        index += tl.where(index < TILE // STEP, 0, full)
        other = queries_begin + index * STEP + tl.arange(0, STEP)
        key_sums, value_sums = _step_of_keys(
            key, value, key_sums, value_sums, grad_out, q, log_sums, deltas, last_keys, other, queries_end, token,
            kv_head * GROUP + step // divisor, scale, HEADS, DIM, BLOCK_D, WINDOW, WHOLE, True,
        )  # fmt: skip
    tl.store(grad_k + place, (key_sums * scale).to(grad_k.dtype.element_ty), mask=mask)
    tl.store(grad_v + place, value_sums.to(grad_v.dtype.element_ty), mask=mask)


def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor,
    starts: Tensor, pieces: tuple[Tensor, Tensor] | None, dtype: torch.dtype, terms: Terms,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `lockstep.ops.attention.attend_backward`; gradients of padding rows, after `starts[-1]`, are zero."""
    grad_out, q, k, v = grad_out.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    rows, heads, dim = q.shape
    kv_heads, count, width = k.shape[1], starts.shape[0] - 1, max(16, triton.next_power_of_2(dim))
    sizes = dict(HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_D=width, WINDOW=terms.window)
    if not (rows and count):
        return grad_q, grad_k, grad_v
    deltas = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    lines = max(1, 2048 // width)
    launch(
        _deltas_kernel, (triton.cdiv(rows * heads, lines),),
        grad_out, out.contiguous(), deltas, rows * heads, DIM=dim, BLOCK_D=width, LINES=lines, num_warps=4,
    )  # fmt: skip
    contexts, first_keys = pieces or (starts.diff(), starts[:-1])
    of_queries, of_keys = _tiles(width, q.dtype)
    tile, step, warps, stages = of_queries
    tile_pieces, tile_rows = tile_map(starts, rows, tile)
    inputs = grad_out, q, k, v, log_sums, deltas
    scale = terms.factor(dim)
    launch(
        _queries_kernel, (tile_pieces.shape[0] * heads,),
        *inputs, grad_q, starts, contexts, first_keys, tile_pieces, tile_rows, count, scale,
        TILE=tile, STEP=step, num_warps=warps, num_stages=stages, **sizes,
    )  # fmt: skip
    tile, step, warps, stages = of_keys
    last_keys = first_queries = last_queries = None
    if pieces is None:
        tile_pieces, tile_rows = tile_map(starts, rows, tile)
    else:
        last_keys = _last_keys(rows, starts, contexts, first_keys)
        # A sequence of several pieces has all of its tiles in the last of them: the others are empty.
        starts = F.pad(first_keys, (0, 1), value=k.shape[0])
        tile_pieces, tile_rows = tile_map(starts, k.shape[0], tile)
        first_queries = torch.searchsorted(last_keys, tile_rows, out_int32=True)
        ends = starts[tile_pieces.clamp(max=count - 1) + 1]
        if terms.window:
            ends = torch.minimum(ends, tile_rows + tile - 1 + terms.window)
        last_queries = torch.searchsorted(last_keys, ends, out_int32=True)
    launch(
        _keys_kernel, (tile_pieces.shape[0] * kv_heads,),
        *inputs, grad_k, grad_v, starts, tile_pieces, tile_rows, count, scale, last_keys, first_queries,
        last_queries, WHOLE=pieces is None, TILE=tile, STEP=step, num_warps=warps, num_stages=stages, **sizes,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _tiles(width: int, dtype: torch.dtype) -> tuple[Launch, Launch]:
    """Those of queries and of keys."""
    if width > 128 and dtype == torch.float32:
        return LARGEST, LARGEST
    if width > 128 or dtype == torch.float32:
        return QUERIES_WIDE, KEYS_WIDE
    return QUERIES, KEYS_NARROW if width <= 64 else KEYS


def _last_keys(rows: int, starts: Tensor, contexts: Tensor, first_keys: Tensor) -> Tensor:
    """The row in `k` of the last key that each query row sees, ascending, int32; padding is after all keys."""
    row = torch.arange(rows, dtype=torch.int32, device=starts.device)
    shift, piece = first_keys + contexts - starts[1:], sequence_of_rows(starts, rows)
    last = shift[piece.clamp(max=len(shift) - 1)] + row
    return torch.where(piece < len(shift), last, torch.iinfo(torch.int32).max)


def sequence_of_rows(starts: Tensor, rows: int) -> Tensor:
    """The sequence of each row; their number, for the padding after `starts[-1]`."""
    row = torch.arange(rows, dtype=starts.dtype, device=starts.device)
    return torch.searchsorted(starts[1:].contiguous(), row, right=True, out_int32=True)


@kernel
def _copies_kernel(
    of_keys, sums, sequences, starts, left_out, first_keys, ends, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence, mask = tl.load(sequences + row), d < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if sequence < count:
        position = row - tl.load(starts + sequence) + tl.load(left_out + sequence)
        total = tl.load(of_keys + (tl.load(first_keys + sequence) + position) * WIDTH + d, mask=mask, other=0.0)
        for other in range(sequence + 1, tl.load(ends + sequence)):
            if position < tl.load(left_out + other):
                copy = (tl.load(first_keys + other) + position) * WIDTH + d
                total += tl.load(of_keys + copy, mask=mask, other=0.0)
    tl.store(sums + row * WIDTH + d, total.to(sums.dtype.element_ty), mask=mask)


def sum_copies(
    of_keys: Tensor, like: Tensor, starts: Tensor, left_out: Tensor, first_keys: Tensor, ends: Tensor
) -> Tensor:
    """Float32 gradients `[keys, heads, dim]` summed by the row that computed them, shaped and rounded as `like`.

    Row `starts[i] + j` computed key `left_out[i] + j` of sequence i, and that key of those sequences from i + 1 up to
    `ends[i]` that leave it out: added in this order. Zero for padding rows.
    """
    sums, width = torch.empty_like(like), like[0].numel() if len(like) else 0
    if len(like):
        block = min(1024, triton.next_power_of_2(width))
        launch(
            _copies_kernel, (len(like), triton.cdiv(width, block)),
            of_keys.contiguous(), sums, sequence_of_rows(starts, len(like)), starts, left_out, first_keys, ends,
            len(left_out), WIDTH=width, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return sums
