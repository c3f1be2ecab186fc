"""Paged causal attention in Triton: one tile of query rows for decode, prefill and training.

A program handles query rows of one key-value head: some tokens of one sequence, all heads of the group. It goes over
the keys in blocks of `BLOCK`, aligned to position 0, in ascending order, with the running maximum and sum in float32.
The tile has the same height whether one of its rows is used, as in decode, or all: the same instructions run, and rows
never mix, so neither the chunk a row came in nor its place in the tile changes a bit.
"""

from __future__ import annotations

from math import log2
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.attention_reference import PLAIN, Terms
from lockstep.ops.cuda.kernel import kernel

PAGE = 16
BLOCK = 64
ROWS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
"""Query rows per tile: 64 are one tensor-core instruction of a Hopper warp group."""
LOG2_E = log2(2.718281828459045)
LAUNCH: dict[str, Any] = {"num_warps": 4, "num_stages": 2}


class Planned:
    """Which rows belong to which sequence and tile, for all layers of a pass.

    All shapes here follow from the arguments' shapes alone: nothing synchronizes with the device, and a CUDA graph can
    record it. Arguments as in `PagedAttention`; `q` and `k` are one layer's, for their shapes.
    """

    def __init__(self, table: Tensor, starts: Tensor, contexts: Tensor, q: Tensor, k: Tensor):
        rows, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
        self.tokens_per_tile = ROWS[q.dtype] // (heads // kv_heads)
        if self.tokens_per_tile < 1:
            raise ValueError(f"{heads // kv_heads} heads of a group exceed the tile of {ROWS[q.dtype]} query rows")
        self.table = table
        # The padding rows after the last sequence are one more sequence, without keys.
        self.starts = torch.cat((starts, starts.new_full((1,), rows)))
        self.contexts = torch.cat((contexts, contexts.new_zeros(1)))
        self.tile_sequences, self.tile_rows = tile_map(self.starts, rows, self.tokens_per_tile)
        self.slots = self._slots(rows)

    def _slots(self, rows: int) -> Tensor:
        """Where each row's key and value go: page · PAGE + offset, int64; -1 for rows that are padding."""
        sequences, width = self.table.shape
        row = torch.arange(rows, device=self.table.device)
        sequence = torch.searchsorted(self.starts[1:], row.to(torch.int32), right=True)
        position = row + (self.contexts - self.starts[1:])[sequence]
        page = (position // PAGE).clamp(0, width - 1)
        slot = self.table[sequence.clamp(max=sequences - 1), page].long() * PAGE + position % PAGE
        return torch.where(position >= 0, slot, -1)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, terms: Terms
    ) -> tuple[Tensor, Tensor]:
        """Writes one layer's keys and values into the pages; the attended values and log-sums of its queries."""
        write_pages(k, v, self.slots, keys, values)
        return attend(q, keys, values, self, terms)


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


@kernel
def _write_kernel(k, v, slots, keys, values, heads, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr):
    """A value that is not finite is written as zero, and its key as NaN: see `write_pages_reference`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        d = tl.arange(0, BLOCK_D)
        page = ((slot // PAGE) * heads + head) * (DIM * PAGE)
        source = (row * heads + head) * DIM + d
        key = tl.load(k + source, mask=d < DIM, other=0.0)
        value = tl.load(v + source, mask=d < DIM, other=0.0)
        broken = tl.sum(tl.where(tl.abs(value.to(tl.float32)) < float("inf"), 0, 1), 0) > 0
        key, value = tl.where(broken, float("nan"), key), tl.where(broken, 0.0, value)
        tl.store(keys + page + d * PAGE + slot % PAGE, key, mask=d < DIM)
        tl.store(values + page + (slot % PAGE) * DIM + d, value, mask=d < DIM)


@kernel(varying=("sequences", "width"))
def _attend_kernel(
    q, out, log_sums, keys, values, table, starts, contexts, tile_sequences, tile_rows, sequences, width, scale, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
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
    # Without a window, every row sees key 0, even unused rows: no maximum stays at -inf.
    position = tl.maximum(context - end + token, 0)
    length = context - end + tl.minimum(first + TOKENS, end)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    if sinks is not None:
        # A key before all others, whose value is zero; scores are in powers of two.
        top = tl.load(sinks + kv_head * GROUP + row % GROUP) * 1.4426950408889634
        total += 1.0
    first_block = 0
    if WINDOW > 0:
        first_block = tl.maximum(context - end + first + 1 - WINDOW, 0) // BLOCK * BLOCK
    attended = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    for start in range(first_block, length, BLOCK):
        key_index = start + tl.arange(0, BLOCK)
        # Whole pages of keys are read: what is past the sequence's end is masked below.
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
        seen = key_index[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= key_index[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        reference = higher
        if WINDOW > 0:
            # For a row whose window begins in a later block, no score is above -inf so far.
            reference = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(weights, 1)
        held = (key_index < length)[:, None] & (d < DIM)[None, :]
        value = tl.load(values + base[:, None] + offset[:, None] * DIM + d[None, :], mask=held, other=0.0)
        attended = attended * shrink[:, None]
        attended = tl.dot(weights.to(value.dtype), value, attended, input_precision="ieee")
        top = higher
    used = total != 0  # NaN too: a broken row must show
    total = tl.where(used, total, 1.0)
    result = tl.where(used[:, None], attended / total[:, None], 0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
    # The natural logarithm of Σ e^score, from powers of two.
    tl.store(log_sums + line, tl.where(used, (top + tl.log2(total)) * 0.6931471805599453, 0.0), mask=row_mask)


def write_pages(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes rows `[tokens, kv_heads, head_dim]` into their slots; those with slot -1 are skipped."""
    k, v = k.contiguous(), v.contiguous()
    tokens, heads, dim = k.shape
    if tokens:
        _write_kernel[(tokens, heads)](
            k, v, slots, keys, values, heads, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), PAGE=PAGE, num_warps=1
        )


def attend(q: Tensor, keys: Tensor, values: Tensor, plan: Planned, terms: Terms = PLAIN) -> tuple[Tensor, Tensor]:
    """Attended values, shaped as `q`, zero for padding rows, and the log-sums `[tokens, heads]`."""
    q = q.contiguous()
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    out, log_sums = torch.empty_like(q), torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    sinks = None if terms.sinks is None else terms.sinks.float().contiguous()
    if rows:
        _attend_kernel[(plan.tile_sequences.shape[0], kv_heads)](
            q, out, log_sums, keys, values, plan.table, plan.starts, plan.contexts,
            plan.tile_sequences, plan.tile_rows, plan.table.shape[0], plan.table.shape[1],
            terms.factor(dim) * LOG2_E, sinks,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)),
            TOKENS=plan.tokens_per_tile, ROWS=ROWS[q.dtype], BLOCK=BLOCK, PAGE=PAGE, WINDOW=terms.window,
            **LAUNCH,
        )  # fmt: skip
    return out, log_sums
