"""Paged causal attention in Triton: one tile of query rows for decode, prefill and training.

A program holds the query rows of one key-value head: some tokens of one sequence, all heads of the group. It goes over
the keys in blocks of `BLOCK`, aligned to position 0, in ascending order, with the running maximum and sum in float32.
The tile has the same height whether one row of it is used, as in decode, or all: the same instructions run, and rows
never mix, so neither the chunk a row came in nor its place in the tile changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PAGE = 16
BLOCK = 64
ROWS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
"""Query rows of a tile: 64 are one tensor-core instruction of a Hopper warp group."""
LOG2_E = log2(2.718281828459045)
LAUNCH: dict[str, Any] = {"num_warps": 4, "num_stages": 2}


@dataclass
class Plan:
    """Which rows belong to which sequence, and which tile holds which rows. The shapes follow from those of the
    arguments alone, so nothing waits for the device and a CUDA graph can record it."""

    table: Tensor
    starts: Tensor
    """First row of each sequence, then that of the padding rows, then the number of rows."""
    contexts: Tensor
    """Keys of each sequence, then 0 for the padding rows."""
    tile_sequences: Tensor
    tile_rows: Tensor
    """Sequence and first row of each tile. Tiles that hold nothing have a sequence past the last."""
    tokens_per_tile: int
    group: int


def plan_of(table: Tensor, starts: Tensor, contexts: Tensor, rows: int, heads: int, kv_heads: int, dtype: torch.dtype) -> Plan:
    """The plan of `rows` rows, of which those from `starts[-1]` on are padding. Shapes as in `PagedAttention`."""
    group = heads // kv_heads
    tokens = ROWS[dtype] // group
    if tokens < 1:
        raise ValueError(f"{group} query heads a key-value head exceed a tile of {ROWS[dtype]} rows")
    starts = torch.cat((starts, starts.new_full((1,), rows))).to(torch.int32)
    contexts = torch.cat((contexts, contexts.new_zeros(1))).to(torch.int32)
    sequences, first = tile_map(starts, rows, tokens)
    return Plan(table.to(torch.int32).contiguous(), starts, contexts, sequences, first, tokens, group)


def tile_map(starts: Tensor, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Sequence and first row of every tile; `starts` ends with `rows`. int32 each."""
    sequences = starts.shape[0] - 1
    counts = (starts[1:] - starts[:-1] + tokens - 1) // tokens
    ends = counts.cumsum(0)
    tile = torch.arange(rows // tokens + sequences, device=starts.device)
    sequence = torch.searchsorted(ends, tile, right=True)
    inside = sequence.clamp(max=sequences - 1)
    first = starts[inside] + (tile - (ends - counts)[inside]) * tokens
    return sequence.to(torch.int32), first.to(torch.int32)


def slots_of(plan: Plan, rows: int) -> Tensor:
    """Where each row's key and value go: page · PAGE + offset, int64; -1 for padding rows."""
    row = torch.arange(rows, device=plan.table.device)
    sequence = torch.searchsorted(plan.starts[1:-1].contiguous(), row, right=True)
    position = row + (plan.contexts - plan.starts[1:])[sequence]
    inside = (sequence < plan.table.shape[0]) & (position >= 0)
    sequence, position = sequence.clamp(max=plan.table.shape[0] - 1), position.clamp(min=0)
    slot = plan.table[sequence, (position // PAGE).clamp(max=plan.table.shape[1] - 1)].long() * PAGE + position % PAGE
    return torch.where(inside, slot, -1)


@triton.jit
def _write_kernel(k, v, slots, keys, values, heads, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        d = tl.arange(0, BLOCK_D)
        page = ((slot // PAGE) * heads + head) * (DIM * PAGE)
        source = (row * heads + head) * DIM + d
        tl.store(keys + page + d * PAGE + slot % PAGE, tl.load(k + source, mask=d < DIM), mask=d < DIM)
        tl.store(values + page + (slot % PAGE) * DIM + d, tl.load(v + source, mask=d < DIM), mask=d < DIM)


@triton.jit(do_not_specialize=["sequences", "width"])
def _attend_kernel(
    q, out, log_sums, keys, values, table, starts, contexts, tile_sequences, tile_rows, sequences, width, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    sequence, kv_head = tl.load(tile_sequences + tl.program_id(0)), tl.program_id(1)
    if sequence > sequences:
        return
    first, end = tl.load(tile_rows + tl.program_id(0)), tl.load(starts + sequence + 1)
    context = tl.load(contexts + sequence)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    row_mask = (token < end) & (row < TOKENS * GROUP)
    line = token.to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    place = line[:, None] * DIM + d[None, :]
    mask = row_mask[:, None] & (d < DIM)[None, :]
    query = tl.load(q + place, mask=mask, other=0.0)
    # Every row sees key 0, rows that are not used too: no maximum stays at -inf.
    position = tl.maximum(context - end + token, 0)
    length = context - end + tl.minimum(first + TOKENS, end)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    attended = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    for start in range(0, length, BLOCK):
        key_index = start + tl.arange(0, BLOCK)
        # Whole pages are read: what lies behind the sequence's end is finite, and masked below.
        page = tl.load(
            table + sequence.to(tl.int64) * width + key_index // PAGE,
            mask=(key_index // PAGE) * PAGE < context, other=0,
        )  # fmt: skip
        # Lets the loads of a page's keys be wide.
        page = tl.max_constancy(page, [16])
        base = page.to(tl.int64) * (KV_HEADS * DIM * PAGE) + kv_head * (DIM * PAGE)
        offset = key_index % PAGE
        key = tl.load(keys + base[None, :] + offset[None, :] + d[:, None] * PAGE, mask=(d < DIM)[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        scores = tl.where(key_index[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(
            values + base[:, None] + offset[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0
        )
        attended = attended * shrink[:, None]
        attended = tl.dot(weights.to(value.dtype), value, attended, input_precision="ieee")
        top = higher
    used = total > 0
    total = tl.where(used, total, 1.0)
    result = tl.where(used[:, None], attended / total[:, None], 0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
    # The natural logarithm of Σ e^score, from powers of two.
    tl.store(log_sums + line, tl.where(used, (top + tl.log2(total)) * 0.6931471805599453, 0.0), mask=row_mask)


def write_pages(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes rows `[tokens, kv_heads, head_dim]` into their slots; a slot of -1 takes none."""
    k, v = k.contiguous(), v.contiguous()
    tokens, heads, dim = k.shape
    if tokens:
        _write_kernel[(tokens, heads)](
            k, v, slots, keys, values, heads, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), PAGE=PAGE, num_warps=1
        )


def attend(q: Tensor, keys: Tensor, values: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attended values, shaped as `q`, zero for padding rows, and the log-sums `[tokens, heads]`."""
    q = q.contiguous()
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    out, log_sums = torch.empty_like(q), torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows:
        _attend_kernel[(plan.tile_sequences.shape[0], kv_heads)](
            q, out, log_sums, keys, values, plan.table, plan.starts, plan.contexts,
            plan.tile_sequences, plan.tile_rows, plan.table.shape[0], plan.table.shape[1], dim**-0.5 * LOG2_E,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)),
            TOKENS=plan.tokens_per_tile, ROWS=ROWS[q.dtype], BLOCK=BLOCK, PAGE=PAGE, **LAUNCH,
        )  # fmt: skip
    return out, log_sums
