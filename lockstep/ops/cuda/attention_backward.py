"""The gradient of packed causal attention in Triton, recomputed from the saved log-sums (arXiv 2205.14135).

Two kernels without atomic additions: one holds a tile of queries and goes over its keys, the other holds a tile of
keys and goes over the queries that see them, one head of the group after the other. So a gradient's bits are the same
in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.attention import tile_map
from lockstep.ops.cuda.kernel import kernel

TILE = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
"""Queries and keys of a tile."""


@kernel
def _queries_kernel(
    grad_out, q, k, v, log_sums, deltas, grad_q, starts, tile_sequences, tile_rows, sequences, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.load(tile_sequences + tl.program_id(0)), tl.program_id(1)
    if sequence >= sequences:
        return
    kv_head = head // (HEADS // KV_HEADS)
    first, begin, end = (
        tl.load(tile_rows + tl.program_id(0)),
        tl.load(starts + sequence),
        tl.load(starts + sequence + 1),
    )
    token, d = first + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    line = token.to(tl.int64) * HEADS + head
    place, mask = line[:, None] * DIM + d[None, :], (token < end)[:, None] & (d < DIM)[None, :]
    query, grad = tl.load(q + place, mask=mask, other=0.0), tl.load(grad_out + place, mask=mask, other=0.0)
    log_sum = tl.load(log_sums + line, mask=token < end, other=float("inf"))
    delta = tl.load(deltas + line, mask=token < end, other=0.0)
    sums = tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
    for start in range(begin, tl.minimum(first + TILE, end), TILE):
        other = start + tl.arange(0, TILE)
        source = (other.to(tl.int64) * KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
        present = (other < end)[:, None] & (d < DIM)[None, :]
        key, value = tl.load(k + source, mask=present, other=0.0), tl.load(v + source, mask=present, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = (other[None, :] <= token[:, None]) & (other < end)[None, :]
        weights = tl.where(seen, tl.exp(scores - log_sum[:, None]), 0.0)
        grad_weights = tl.dot(grad, tl.trans(value), input_precision="ieee")
        grad_scores = weights * (grad_weights - delta[:, None]) * scale
        sums = tl.dot(grad_scores.to(key.dtype), key, sums, input_precision="ieee")
    tl.store(grad_q + place, sums.to(grad_q.dtype.element_ty), mask=mask)


@kernel
def _keys_kernel(
    grad_out, q, k, v, log_sums, deltas, grad_k, grad_v, starts, tile_sequences, tile_rows, sequences, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    sequence, kv_head = tl.load(tile_sequences + tl.program_id(0)), tl.program_id(1)
    if sequence >= sequences:
        return
    first, end = tl.load(tile_rows + tl.program_id(0)), tl.load(starts + sequence + 1)
    token, d = first + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    place = (token.to(tl.int64) * KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
    mask = (token < end)[:, None] & (d < DIM)[None, :]
    key, value = tl.load(k + place, mask=mask, other=0.0), tl.load(v + place, mask=mask, other=0.0)
    key_sums, value_sums = tl.zeros((TILE, BLOCK_D), dtype=tl.float32), tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
    steps = tl.cdiv(end - first, TILE)
    for step in range(0, GROUP * steps):
        head = kv_head * GROUP + step // steps
        other = first + (step % steps) * TILE + tl.arange(0, TILE)
        line = other.to(tl.int64) * HEADS + head
        source, present = line[:, None] * DIM + d[None, :], (other < end)[:, None] & (d < DIM)[None, :]
        query, grad = tl.load(q + source, mask=present, other=0.0), tl.load(grad_out + source, mask=present, other=0.0)
        log_sum = tl.load(log_sums + line, mask=other < end, other=float("inf"))
        delta = tl.load(deltas + line, mask=other < end, other=0.0)
        # Keys down, queries across: both sums are products with this from the left.
        scores = tl.dot(key, tl.trans(query), input_precision="ieee") * scale
        seen = (token[:, None] <= other[None, :]) & (other < end)[None, :]
        weights = tl.where(seen, tl.exp(scores - log_sum[None, :]), 0.0)
        value_sums = tl.dot(weights.to(grad.dtype), grad, value_sums, input_precision="ieee")
        grad_weights = tl.dot(value, tl.trans(grad), input_precision="ieee")
        grad_scores = weights * (grad_weights - delta[None, :]) * scale
        key_sums = tl.dot(grad_scores.to(query.dtype), query, key_sums, input_precision="ieee")
    tl.store(grad_k + place, key_sums.to(grad_k.dtype.element_ty), mask=mask)
    tl.store(grad_v + place, value_sums.to(grad_v.dtype.element_ty), mask=mask)


def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `q`, `k` and `v`; those of padding rows, behind `starts[-1]`, are zero."""
    grad_out, q, k, v = grad_out.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    deltas = (grad_out.float() * out.float()).sum(-1)
    rows, heads, dim = q.shape
    kv_heads, tile, sequences = k.shape[1], TILE[q.dtype], starts.shape[0] - 1
    tile_sequences, tile_rows = tile_map(starts, rows, tile)
    sizes = dict(
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), TILE=tile, num_stages=2,
    )  # fmt: skip
    count = tile_sequences.shape[0]
    if rows and sequences:
        common = (starts, tile_sequences, tile_rows, sequences, dim**-0.5)
        _queries_kernel[(count, heads)](grad_out, q, k, v, log_sums, deltas, grad_q, *common, num_warps=4, **sizes)
        # Two sums of 64 x 128 do not fit the registers of four warps.
        _keys_kernel[(count, kv_heads)](
            grad_out, q, k, v, log_sums, deltas, grad_k, grad_v, *common, num_warps=8, **sizes
        )
    return grad_q, grad_k, grad_v
