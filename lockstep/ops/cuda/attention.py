"""Paged causal attention in Triton: one tile of query rows for decode, prefill and training.

A program handles query rows of one key-value head: some tokens of one sequence, all heads of the group. It goes over
the keys in blocks of `BLOCK`, aligned to position 0, in ascending order, with the running maximum and sum in float32.
The tile has the same height whether one of its rows is used, as in decode, or all: the same instructions run, and rows
never mix, so neither the chunk a row came in nor its place in the tile changes a bit. Long pieces of sequences have
tiles of twice the height, of two warp groups that each run these instructions; this is checked on the device at the
first use of a shape.
"""

from __future__ import annotations

from functools import cache, cached_property
from math import log2

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lockstep.ops.attention_reference import PLAIN, Terms
from lockstep.ops.cuda.kernel import kernel, launch

PAGE = 16
BLOCK = 64
ROWS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
"""Query rows per tile: 64 are one tensor-core instruction of a Hopper warp group."""
LOG2_E = log2(2.718281828459045)
LONG = 64
"""Tokens per sequence, on average, from which tiles are twice as high."""
WARPS = 4
"""Of a tile of ROWS."""
STAGES, STAGES_HIGH = 3, 4
"""Measured on an H100 (`benchmarks/NOTES.md`)."""


class Planned:
    """Which rows belong to which sequence and tile, for all layers of a pass.

    All shapes here follow from the arguments' shapes alone: nothing synchronizes with the device, and a CUDA graph can
    record it. Arguments as in `PagedAttention`; `q` and `k` are one layer's, for their shapes. ordered: whether a
    sequence's pages follow each other in memory. height: query rows of a tile; None: the faster of those with equal
    bits.
    """

    def __init__(
        self,
        table: Tensor,
        starts: Tensor,
        contexts: Tensor,
        q: Tensor,
        k: Tensor,
        ordered: bool = False,
        height: int | None = None,
    ):
        self.rows = rows = q.shape[0]
        heads, kv_heads = q.shape[1], k.shape[1]
        if heads // kv_heads > ROWS[q.dtype]:
            raise ValueError(f"{heads // kv_heads} heads of a group exceed the tile of {ROWS[q.dtype]} query rows")
        if height is None:
            is_long = rows >= LONG * len(contexts)
            high = is_long and high_tiles_agree(q.dtype, q.device, heads, kv_heads, q.shape[2])
            height = ROWS[q.dtype] * (2 if high else 1)
        self.height, self.tokens_per_tile = height, height // (heads // kv_heads)
        self.table, self.ordered = table, ordered
        # The padding rows after the last sequence are one more sequence, without keys.
        self.starts = torch.cat((starts, starts.new_full((1,), rows)))
        self.contexts = torch.cat((contexts, contexts.new_zeros(1)))
        self.tile_sequences, self.tile_rows = tile_map(self.starts, rows, self.tokens_per_tile)

    @cached_property
    def slots(self) -> Tensor:
        """Where each row's key and value go: page · PAGE + offset, int64; -1 for rows that are padding."""
        sequences, width = self.table.shape
        row = torch.arange(self.rows, device=self.table.device)
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


@cache
def high_tiles_agree(dtype: torch.dtype, device: torch.device, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether tiles of twice the height have the bits of the others, with this GPU and compiler.

    Neighbors have the same key and opposite values: what is left of their sums is how each was rounded.
    """
    if dtype == torch.float32:
        return False  # its products, on the ordinary cores, gain nothing
    lengths = [LONG + 9, 3 * BLOCK - 1, 5 * BLOCK + 1]
    rows, generator = sum(lengths) + 1, torch.Generator().manual_seed(heads * 1_000_003 + dim)
    q, k, v = (torch.randn(rows, count, dim, generator=generator) for count in (heads, kv_heads, kv_heads))
    k[1::2], v[1::2] = k[::2], -v[::2]
    q, k, v = (x.to(device, dtype) for x in (q * 2, k, v))
    contexts = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.cat((contexts.new_zeros(1), contexts.cumsum(0, dtype=torch.int32)))
    width = -(-max(lengths) // PAGE)
    table = torch.arange(len(lengths) * width, dtype=torch.int32, device=device).view(len(lengths), width)
    keys, values = k.new_zeros(table.numel(), kv_heads, dim, PAGE), k.new_zeros(table.numel(), kv_heads, PAGE, dim)
    low, high = (Planned(table, starts, contexts, q, k, height=times * ROWS[dtype]) for times in (1, 2))
    sinks = torch.linspace(-2, 2, heads, device=device)
    try:
        return all(
            torch.equal(one, other)
            for terms in (PLAIN, Terms(window=BLOCK + 6, sinks=sinks))
            for one, other in zip(low(q, k, v, keys, values, terms), high(q, k, v, keys, values, terms))
        )
    except OutOfResources:  # the shared memory of this GPU is too small for them
        return False


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


@kernel
def _block(
    query, keys, values, pages, context, start, position, length, kv_head, scale, top, total, attended,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, ORDERED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax after a block of keys. Without a mask, every row sees all of them: the same bits, in less
    time. `pages`: the sequence's row of the table, or if they are ordered, the first."""
    key_index, d = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    # Whole pages of keys are read: what is past the sequence's end is masked below.
    in_use = (key_index // PAGE) * PAGE < context
    if ORDERED:
        page = pages + key_index // PAGE
        if MASKED:
            page = tl.where(in_use, page, 0)
    elif MASKED:
        page = tl.load(pages + key_index // PAGE, mask=in_use, other=0)
    else:
        page = tl.load(pages + key_index // PAGE)
    # Lets the loads of a page's keys be wide.
    page = tl.max_constancy(page, [16])
    base = page.to(tl.int64) * (KV_HEADS * DIM * PAGE) + kv_head * (DIM * PAGE)
    offset = key_index % PAGE
    key = tl.load(keys + base[None, :] + offset[None, :] + d[:, None] * PAGE, mask=(d < DIM)[:, None], other=0.0)
    scores = tl.dot(query, key, input_precision="ieee")
    held = (d < DIM)[None, :]
    if MASKED:
        seen = key_index[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= key_index[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        held &= (key_index < length)[:, None]
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    reference = higher
    if WINDOW > 0:
        # For a row whose window begins in a later block, no score is above -inf so far.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
    # Multiplied and subtracted in one rounding, with and without a mask.
    weights = tl.exp2(tl.fma(scores, scale, -reference[:, None]))
    shrink = tl.exp2(top - reference)
    total = total * shrink + tl.sum(weights, 1)
    value = tl.load(values + base[:, None] + offset[:, None] * DIM + d[None, :], mask=held, other=0.0)
    attended = tl.dot(weights.to(value.dtype), value, attended * shrink[:, None], input_precision="ieee")
    return higher, total, attended


@kernel(varying=("sequences", "width"))
def _attend_kernel(
    q, out, log_sums, keys, values, table, starts, contexts, tile_sequences, tile_rows, sequences, width, scale, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, ORDERED: tl.constexpr,
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
    attended = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    pages = table + sequence.to(tl.int64) * width
    if ORDERED:
        pages = tl.load(pages, mask=context > 0, other=0)  # the padding has none
    masked_from = 0
    if WINDOW > 0:
        masked_from = tl.maximum(context - end + first + 1 - WINDOW, 0) // BLOCK * BLOCK
    else:
        # All rows see the blocks up to the first row's own.
        masked_from = tl.maximum(context - end + first + 1, 0) // BLOCK * BLOCK
        for start in range(0, masked_from, BLOCK):
            top, total, attended = _block(
                query, keys, values, pages, context, start, position, length, kv_head, scale, top, total, attended,
                KV_HEADS, DIM, BLOCK_D, BLOCK, PAGE, WINDOW, ORDERED, False,
            )  # fmt: skip
    for start in range(masked_from, length, BLOCK):
        top, total, attended = _block(
            query, keys, values, pages, context, start, position, length, kv_head, scale, top, total, attended,
            KV_HEADS, DIM, BLOCK_D, BLOCK, PAGE, WINDOW, ORDERED, True,
        )  # fmt: skip
    used = total != 0  # NaN too: a broken row must show
    total = tl.where(used, total, 1.0)
    result = tl.where(used[:, None], attended / total[:, None], 0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
    # The natural logarithm of Σ e^score, from powers of two.
    tl.store(log_sums + line, tl.where(used, (top + tl.log2(total)) * 0.6931471805599453, 0.0), mask=row_mask)


@kernel
def _write_all_kernel(
    k, v, first_rows, end_rows, keys, values, heads, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr
):
    """One page of one head, and zeros where it has no row."""
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, d = tl.arange(0, PAGE), tl.arange(0, BLOCK_D)
    row = tl.load(first_rows + page) + place
    mask = (row < tl.load(end_rows + page))[:, None] & (d < DIM)[None, :]
    source = (row.to(tl.int64) * heads + head)[:, None] * DIM + d[None, :]
    key, value = tl.load(k + source, mask=mask, other=0.0), tl.load(v + source, mask=mask, other=0.0)
    broken = (tl.sum(tl.where(tl.abs(value.to(tl.float32)) < float("inf"), 0, 1), 1) > 0)[:, None]
    key, value = tl.where(broken, float("nan"), key), tl.where(broken, 0.0, value)
    base = (page * heads + head) * (DIM * PAGE)
    tl.store(keys + base + d[:, None] * PAGE + place[None, :], tl.trans(key), mask=(d < DIM)[:, None])
    tl.store(values + base + place[:, None] * DIM + d[None, :], value, mask=(d < DIM)[None, :])


def ordered_pages(k: Tensor, v: Tensor, first_rows: Tensor, end_rows: Tensor) -> tuple[Tensor, Tensor]:
    """New pages: page i has the rows from `first_rows[i]` on, of those before `end_rows[i]`, int32."""
    k, v = k.contiguous(), v.contiguous()
    (_, heads, dim), count = k.shape, len(first_rows)
    keys, values = k.new_empty(count, heads, dim, PAGE), v.new_empty(count, heads, PAGE, dim)
    if count:
        launch(
            _write_all_kernel, (count, heads),
            k, v, first_rows, end_rows, keys, values, heads,
            DIM=dim, BLOCK_D=triton.next_power_of_2(dim), PAGE=PAGE, num_warps=4,
        )  # fmt: skip
    return keys, values


def write_pages(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes rows `[tokens, kv_heads, head_dim]` into their slots; those with slot -1 are skipped."""
    k, v = k.contiguous(), v.contiguous()
    tokens, heads, dim = k.shape
    if tokens:
        launch(
            _write_kernel,
            (tokens, heads),
            k,
            v,
            slots,
            keys,
            values,
            heads,
            DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            PAGE=PAGE,
            num_warps=1,
        )


def attend(q: Tensor, keys: Tensor, values: Tensor, plan: Planned, terms: Terms = PLAIN) -> tuple[Tensor, Tensor]:
    """Attended values, shaped as `q`, zero for padding rows, and the log-sums `[tokens, heads]`."""
    q = q.contiguous()
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    out, log_sums = torch.empty_like(q), torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    sinks = None if terms.sinks is None else terms.sinks.float().contiguous()
    high = plan.height > ROWS[q.dtype]
    if rows:
        launch(
            _attend_kernel, (plan.tile_sequences.shape[0], kv_heads),
            q, out, log_sums, keys, values, plan.table, plan.starts, plan.contexts,
            plan.tile_sequences, plan.tile_rows, plan.table.shape[0], plan.table.shape[1],
            terms.factor(dim) * LOG2_E, sinks,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)),
            TOKENS=plan.tokens_per_tile, ROWS=plan.height, BLOCK=BLOCK, PAGE=PAGE, WINDOW=terms.window,
            ORDERED=plan.ordered, num_warps=2 * WARPS if high else WARPS, num_stages=STAGES_HIGH if high else STAGES,
            # No product and sum may be rounded once in one variant of the kernel, and twice in another.
            enable_fp_fusion=False,
        )  # fmt: skip
    return out, log_sums
