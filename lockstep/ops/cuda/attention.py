"""Paged causal attention in Triton: one tile of query rows for decode, prefill and training.

A program handles query rows of one key-value head: some tokens of one sequence, all heads of the group. It iterates
over the keys in blocks of `BLOCK`, aligned to position 0, in ascending order, with the running maximum and sum in
float32. The running softmax restarts every `CHUNK` keys, and the chunks are joined in ascending order: so one program
per chunk can process a long context in decode (arXiv 2311.01282), or a single program all chunks in turn.
The tile has the same height whether one of its rows is used, as in decode, or all: the same instructions run, and rows
never mix, so neither how a prompt was chunked nor a row's place in the tile changes a bit. Long pieces of sequences
have tiles of twice the height, of two warp groups that each run these instructions; this is checked on the device at
the first use of a shape.
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
CHUNK = 2048
"""Keys of one running softmax, a multiple of BLOCK."""
PROGRAMS = 264
"""Up to this number of programs, each chunk of a tile has one: two per multiprocessor of an H100."""
AHEAD = 4
"""Chunks loaded at once when they are joined."""
LONG = 64
"""Mean tokens per sequence from which tiles are twice as high."""
WARPS = 4
"""Warps of a tile of ROWS."""
STAGES = 3
"""Measured on an H100 (`benchmarks/NOTES.md`)."""


class Planned:
    """The assignment of rows to sequences and tiles, for all layers of a pass.

    All shapes follow from the arguments' shapes alone: nothing synchronizes with the device, and a CUDA graph can
    capture it. Arguments as in `PagedAttention`; `q` and `k` are one layer's, for their shapes. ordered: whether a
    sequence's pages are consecutive in memory. height: query rows of a tile; None: the fastest of those with equal
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
        # The padding rows after the last sequence are an additional sequence without keys.
        self.starts = torch.cat((starts, starts.new_full((1,), rows)))
        self.contexts = torch.cat((contexts, contexts.new_zeros(1)))
        self.tile_sequences, self.tile_rows = tile_map(self.starts, rows, self.tokens_per_tile)

    @cached_property
    def slots(self) -> Tensor:
        """The slot of each row's key and value: page · PAGE + offset, int64; -1 for padding rows."""
        sequences, width = self.table.shape
        page = (self.positions // PAGE).clamp(0, width - 1)
        slot = self.table[self._sequences.clamp(max=sequences - 1), page].long() * PAGE + self.positions % PAGE
        return torch.where(self.positions >= 0, slot, -1)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each row in its sequence, int64; negative for padding rows."""
        row = torch.arange(self.rows, device=self.table.device)
        return row + (self.contexts - self.starts[1:])[self._sequences]

    @cached_property
    def _sequences(self) -> Tensor:
        row = torch.arange(self.rows, dtype=torch.int32, device=self.table.device)
        return torch.searchsorted(self.starts[1:], row, right=True)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, terms: Terms
    ) -> tuple[Tensor, Tensor]:
        """Writes one layer's keys and values into the pages, and returns its attended values and log-sums."""
        write_pages(k, v, self.slots, keys, values)
        return attend(q, keys, values, self, terms)


@cache
def high_tiles_agree(dtype: torch.dtype, device: torch.device, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether tiles of twice the height give the same bits as the others, with this GPU and compiler.

    Neighboring tokens have the same key and opposite values, so that their sums consist of rounding errors.
    """
    if dtype == torch.float32:
        return False  # float32 products run on CUDA cores, and are not faster
    lengths = [LONG + 9, 3 * BLOCK - 1, CHUNK + 5 * BLOCK + 1]
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
    except OutOfResources:  # this GPU has too little shared memory for them
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
def heavy_first(HEADS: tl.constexpr):
    """Tile and head of a program of tiles · heads. The last tiles come first: they see the most keys."""
    index = tl.program_id(0)
    return tl.num_programs(0) // HEADS - 1 - index // HEADS, index % HEADS


@kernel
def _finite(top):
    """The maximum to subtract: 0 for a row that has not seen a key yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@kernel
def _block(
    query, keys, values, pages, context, start, position, length, kv_head, scale, top, total, attended,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, ORDERED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax after a block of keys. Without MASKED, every row sees all of them: the same bits in less
    time. `pages`: the sequence's row of the table, or if ORDERED, its first page."""
    key_index, d = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    # Whole pages of keys are read; keys past the sequence's end are masked below.
    in_use = (key_index // PAGE) * PAGE < context
    if ORDERED:
        page = pages + key_index // PAGE
        if MASKED:
            page = tl.where(in_use, page, 0)
    elif MASKED:
        page = tl.load(pages + key_index // PAGE, mask=in_use, other=0)
    else:
        page = tl.load(pages + key_index // PAGE)
    # Lets the compiler use wide loads for a page's keys.
    page = tl.max_constancy(page, [16])
    base = page.to(tl.int64) * (KV_HEADS * DIM * PAGE) + kv_head * (DIM * PAGE)
    offset = key_index % PAGE
    key = tl.load(keys + base[None, :] + offset[None, :] + d[:, None] * PAGE, mask=(d < DIM)[:, None], other=0.0)
    scores = tl.dot(query, key, input_precision="ieee")
    in_bounds = (d < DIM)[None, :]
    if MASKED:
        seen = key_index[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= key_index[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        in_bounds &= (key_index < length)[:, None]
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    reference = higher
    if MASKED:
        reference = _finite(higher)
    # An explicit FMA, so that the kernel rounds alike with and without a mask.
    weights = tl.exp2(tl.fma(scores, scale, -reference[:, None]))
    shrink = tl.exp2(top - reference)
    total = total * shrink + tl.sum(weights, 1)
    value = tl.load(values + base[:, None] + offset[:, None] * DIM + d[None, :], mask=in_bounds, other=0.0)
    attended = tl.dot(weights.to(value.dtype), value, attended * shrink[:, None], input_precision="ieee")
    return higher, total, attended


@kernel
def _chunk(
    query, keys, values, pages, context, begin, stop, all_seen, position, length, kv_head, scale,
    ROWS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """The softmax over the keys from `begin` to `stop`. All rows see the keys before `all_seen`."""
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    attended = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    # These hints make loads wide. Padding rows' values are not multiples, but bound no block.
    begin = tl.multiple_of(begin, BLOCK)
    masked = tl.multiple_of(tl.minimum(tl.maximum(begin, all_seen), stop), BLOCK)
    if WINDOW == 0:
        for start in range(begin, masked, BLOCK):
            top, total, attended = _block(
                query, keys, values, pages, context, start, position, length, kv_head, scale, top, total, attended,
                KV_HEADS, DIM, BLOCK_D, BLOCK, PAGE, WINDOW, ORDERED, False,
            )  # fmt: skip
    for start in range(masked, stop, BLOCK):
        top, total, attended = _block(
            query, keys, values, pages, context, start, position, length, kv_head, scale, top, total, attended,
            KV_HEADS, DIM, BLOCK_D, BLOCK, PAGE, WINDOW, ORDERED, True,
        )  # fmt: skip
    return top, total, attended


@kernel
def _joined(top, total, attended, next_top, next_total, next_attended):
    """The softmax over the keys of both. For a row that sees none of one's keys, the other's bits."""
    higher = tl.maximum(top, next_top)
    reference = _finite(higher)
    left, right = tl.exp2(top - reference), tl.exp2(next_top - reference)
    return higher, total * left + next_total * right, attended * left[:, None] + next_attended * right[:, None]


@kernel
def _finish(out, log_sums, sinks, head, line, place, row_mask, mask, top, total, attended):
    """Writes the attended values and the log-sums of rows that have seen all their keys."""
    if sinks is not None:
        # The sink is a key whose value is zero; scores are exponents of two.
        sink = tl.load(sinks + head) * 1.4426950408889634
        top, total, attended = _joined(top, total, attended, sink, tl.zeros_like(total) + 1.0, tl.zeros_like(attended))
    used = total != 0  # also true for NaN, which must propagate
    total = tl.where(used, total, 1.0)
    result = tl.where(used[:, None], attended / total[:, None], 0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
    # The natural logarithm of Σ e^score, from the sum of powers of two.
    tl.store(log_sums + line, tl.where(used, (top + tl.log2(total)) * 0.6931471805599453, 0.0), mask=row_mask)


@kernel(varying=("sequences", "width", "lines"))
def _attend_kernel(
    q, out, log_sums, keys, values, table, starts, contexts, tile_sequences, tile_rows, sequences, width, scale, sinks,
    tops, totals, parts, lines,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, ORDERED: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """CHUNKS: at most "one"; several, "in turn" in one program; or "apart", a program each, for `_join_kernel`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head = heavy_first(KV_HEADS)
    sequence = tl.load(tile_sequences + tile)
    if sequence > sequences:
        return
    first, end = tl.load(tile_rows + tile), tl.load(starts + sequence + 1)
    context = tl.load(contexts + sequence)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    row_mask = (token < end) & (row < TOKENS * GROUP)
    line = token.to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    place = line[:, None] * DIM + d[None, :]
    mask = row_mask[:, None] & (d < DIM)[None, :]
    query = tl.load(q + place, mask=mask, other=0.0)
    position = context - end + token
    length = context - end + tl.minimum(first + TOKENS, end)
    pages = table + sequence.to(tl.int64) * width
    if ORDERED:
        pages = tl.load(pages, mask=context > 0, other=0)  # the padding has none
    first_block, all_seen = 0, 0
    if WINDOW > 0:
        first_block = tl.maximum(context - end + first + 1 - WINDOW, 0) // BLOCK * BLOCK
    else:
        # All rows see the blocks up to the first row's position.
        all_seen = tl.maximum(context - end + first + 1, 0) // BLOCK * BLOCK
    head = kv_head * GROUP + row % GROUP
    if CHUNKS == "one":
        top, total, attended = _chunk(
            query, keys, values, pages, context, first_block, length, all_seen, position, length, kv_head, scale,
            ROWS, KV_HEADS, DIM, BLOCK_D, BLOCK, PAGE, WINDOW, ORDERED,
        )  # fmt: skip
        _finish(out, log_sums, sinks, head, line, place, row_mask, mask, top, total, attended)
    elif CHUNKS == "in turn":
        chunk = first_block // CHUNK * CHUNK
        top, total, attended = _chunk(
            query, keys, values, pages, context, first_block, tl.minimum(chunk + CHUNK, length), all_seen, position,
            length, kv_head, scale, ROWS, KV_HEADS, DIM, BLOCK_D, BLOCK, PAGE, WINDOW, ORDERED,
        )  # fmt: skip
        # The sums so far are spilled to memory: two chunks' sums do not fit in registers. A contiguous block per tile
        # needs no registers for addresses.
        spilled = parts + (tile.to(tl.int64) * KV_HEADS + kv_head) * (ROWS * BLOCK_D)
        spilled += row[:, None] * BLOCK_D + d[None, :]
        for begin in range(chunk + CHUNK, length, CHUNK):
            tl.store(spilled, attended)
            part_top, part_total, part = _chunk(
                query, keys, values, pages, context, begin, tl.minimum(begin + CHUNK, length), all_seen, position,
                length, kv_head, scale, ROWS, KV_HEADS, DIM, BLOCK_D, BLOCK, PAGE, WINDOW, ORDERED,
            )  # fmt: skip
            tl.debug_barrier()
            attended = tl.load(spilled)
            tl.debug_barrier()
            top, total, attended = _joined(top, total, attended, part_top, part_total, part)
        _finish(out, log_sums, sinks, head, line, place, row_mask, mask, top, total, attended)
    else:
        for index in range(first_block // CHUNK + tl.program_id(1), tl.cdiv(length, CHUNK), tl.num_programs(1)):
            begin = tl.maximum(index * CHUNK, first_block)
            top, total, attended = _chunk(
                query, keys, values, pages, context, begin, tl.minimum(index * CHUNK + CHUNK, length), all_seen,
                position, length, kv_head, scale, ROWS, KV_HEADS, DIM, BLOCK_D, BLOCK, PAGE, WINDOW, ORDERED,
            )  # fmt: skip
            shift = index * lines.to(tl.int64)
            tl.store(tops + shift + line, top, mask=row_mask)
            tl.store(totals + shift + line, total, mask=row_mask)
            tl.store(parts + shift * DIM + place, attended, mask=mask)


@kernel(varying=("lines",))
def _join_kernel(
    out, log_sums, tops, totals, parts, positions, sinks, lines,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Joins the chunks of one row and head, in ascending order."""
    token, one, d = tl.program_id(0), tl.arange(0, 1), tl.arange(0, BLOCK_D)
    head = tl.program_id(1) + one
    position, line = tl.load(positions + token), token.to(tl.int64) * HEADS + head
    place, present = line[:, None] * DIM + d[None, :], (d < DIM)[None, :]
    top = tl.full((1,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    attended = tl.zeros((1, BLOCK_D), dtype=tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0) // CHUNK
    stop = (position + CHUNK) // CHUNK  # 0 for padding
    for start in range(first, stop, AHEAD):
        for index in tl.static_range(AHEAD):
            chunk = start + index
            inside, shift = chunk + one < stop, chunk * lines.to(tl.int64)
            next_top = tl.load(tops + shift + line, mask=inside, other=float("-inf"))
            next_total = tl.load(totals + shift + line, mask=inside, other=0.0)
            part = tl.load(parts + shift * DIM + place, mask=inside[:, None] & present, other=0.0)
            top, total, attended = _joined(top, total, attended, next_top, next_total, part)
    _finish(out, log_sums, sinks, head, line, place, one == 0, present, top, total, attended)


@kernel
def _write_all_kernel(
    k, v, first_rows, end_rows, keys, values, heads, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr
):
    """Writes one page of one head, with zeros where there is no row."""
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
    """New pages: page i has the rows from `first_rows[i]` up to `end_rows[i]`, int32, as far as they fit."""
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
    """Writes rows `[tokens, kv_heads, head_dim]` into their slots; rows with slot -1 are skipped."""
    k, v = k.contiguous(), v.contiguous()
    tokens, heads, dim = k.shape
    if tokens:
        launch(
            _write_kernel, (tokens, heads),
            k, v, slots, keys, values, heads, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), PAGE=PAGE, num_warps=1,
        )  # fmt: skip


def attend(q: Tensor, keys: Tensor, values: Tensor, plan: Planned, terms: Terms = PLAIN) -> tuple[Tensor, Tensor]:
    """Attended values, shaped as `q`, zero for padding rows, and the log-sums `[tokens, heads]`."""
    q = q.contiguous()
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    out, log_sums = torch.empty_like(q), torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    sinks = None if terms.sinks is None else terms.sinks.float().contiguous()
    if not rows:
        return out, log_sums
    high, tiles = plan.height > ROWS[q.dtype], plan.tile_sequences.shape[0]
    # In a captured graph, the table is as wide as the longest context of a replay.
    chunks = triton.cdiv(plan.table.shape[1] * PAGE, CHUNK)
    programs = 1 if high else max(1, min(chunks, PROGRAMS // (tiles * kv_heads)))
    tops = totals = parts = None
    width = max(16, triton.next_power_of_2(dim))
    if programs > 1:
        tops, totals = (torch.empty(chunks, rows, heads, dtype=torch.float32, device=q.device) for _ in range(2))
        parts = torch.empty(chunks, rows, heads, dim, dtype=torch.float32, device=q.device)
    elif chunks > 1:
        parts = torch.empty(tiles, kv_heads, plan.height, width, dtype=torch.float32, device=q.device)
    sizes = dict(HEADS=heads, DIM=dim, BLOCK_D=width, WINDOW=terms.window, CHUNK=CHUNK)
    form = "one" if chunks == 1 else "apart" if programs > 1 else "in turn"
    # Joining uses more registers than the blocks of keys: two programs with small heads fit on a multiprocessor.
    registers = 128 if form == "in turn" and high and dim <= 64 else None
    # No fusion: one variant of a kernel must not round a product and sum once, and another twice.
    launch(
        _attend_kernel, (tiles * kv_heads, programs),
        q, out, log_sums, keys, values, plan.table, plan.starts, plan.contexts,
        plan.tile_sequences, plan.tile_rows, plan.table.shape[0], plan.table.shape[1],
        terms.factor(dim) * LOG2_E, sinks, tops, totals, parts, rows * heads,
        **sizes, KV_HEADS=kv_heads, TOKENS=plan.tokens_per_tile, ROWS=plan.height, BLOCK=BLOCK, PAGE=PAGE,
        ORDERED=plan.ordered, CHUNKS=form, num_warps=2 * WARPS if high else WARPS,
        num_stages=STAGES, maxnreg=registers, enable_fp_fusion=False,
    )  # fmt: skip
    if programs > 1:
        launch(
            _join_kernel, (rows, heads), out, log_sums, tops, totals, parts, plan.positions, sinks, rows * heads,
            **sizes, AHEAD=AHEAD, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out, log_sums
