"""The gated delta rule in Triton: one kernel for training, prefill and decode.

Packed sequences are a step from position 0, so all forms launch the same compiled variants: of the rows (convolution,
norms, decays), of the recurrence, and of what a slot keeps. The recurrence takes 16 rows at a time, at multiples of 16
from position 0. So a row always has the same place in its tile, whether it is alone there, as in decode, or not: the
same instructions run, and rows of a product never mix. A row reads the state at its chunk's beginning, then the
chunk's earlier tiles in ascending order, then its tile's rows up to it, each with one multiply-add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda import delta_rows
from lockstep.ops.cuda.attention_backward import sequence_of_rows
from lockstep.ops.cuda.delta_rows import Kept, Places, Rows, compute_rows, keep_rows, sizes_of
from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.delta_reference import DeltaTerms

CHUNK = delta_rows.CHUNK
TILE = 16
"""Rows of the recurrence at a time: the fewest that a product may have."""


@kernel
def _keys_at(
    k, keys, begin, position, d, first, context, cell, key_head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr
):
    """Features `d` of the keys at some positions of a chunk: this step's, or those that the slot's `cell` keeps."""
    row = (begin + position - first).to(tl.int64)
    in_step = (position >= first) & (position < context)
    of_step = tl.load(
        k + (row * KEY_HEADS + key_head)[:, None] * KEY_DIM + d[None, :],
        mask=in_step[:, None] & (d < KEY_DIM)[None, :], other=0.0,
    )  # fmt: skip
    of_slot = tl.load(
        keys + ((cell * KEY_HEADS + key_head) * KEY_DIM + d[None, :]) * CHUNK + (position % CHUNK)[:, None],
        mask=(position < first)[:, None] & (d < KEY_DIM)[None, :], other=0.0,
    )  # fmt: skip
    return tl.where(in_step[:, None], of_step, of_slot)


@kernel
def _queries_at(
    q, begin, position, d, first, context, key_head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr
):  # fmt: skip
    row = (begin + position - first).to(tl.int64)
    return tl.load(
        q + (row * KEY_HEADS + key_head)[:, None] * KEY_DIM + d[None, :],
        mask=((position >= first) & (position < context))[:, None] & (d < KEY_DIM)[None, :], other=0.0,
    )  # fmt: skip


@kernel
def _sums_at(sums, decays, begin, position, first, context, cell, head, VALUE_HEADS: tl.constexpr):
    row = (begin + position - first).to(tl.int64)
    in_step = (position >= first) & (position < context)
    of_step = tl.load(sums + row * VALUE_HEADS + head, mask=in_step, other=0.0)
    of_slot = tl.load(decays + (cell * VALUE_HEADS + head) * CHUNK + position % CHUNK, mask=position < first, other=0.0)
    return tl.where(in_step, of_step, of_slot)


@kernel
def _read_state(
    q, k, keys, state, is_read, begin, position, first, context, cell, key_head,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What a tile's keys and queries read in the state."""
    old, result = tl.zeros((TILE, BLOCK_V), dtype=tl.float32), tl.zeros((TILE, BLOCK_V), dtype=tl.float32)
    for start in range(0, KEY_DIM, STEP):
        d = start + tl.arange(0, STEP)
        part = tl.load(state + d[:, None] * VALUE_DIM, mask=(d < KEY_DIM)[:, None] & is_read, other=0.0)
        key = _keys_at(k, keys, begin, position, d, first, context, cell, key_head, KEY_HEADS, KEY_DIM)
        query = _queries_at(q, begin, position, d, first, context, key_head, KEY_HEADS, KEY_DIM)
        old = tl.dot(key, part, old, input_precision="ieee")
        result = tl.dot(query, part, result, input_precision="ieee")
    return old, result


@kernel
def _read_keys(
    q, k, keys, begin, position, other, first, context, cell, key_head,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The products of a tile's keys and queries with the keys of another tile of the chunk, or its own."""
    at_keys, at_queries = tl.zeros((TILE, TILE), dtype=tl.float32), tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, KEY_DIM, STEP):
        d = start + tl.arange(0, STEP)
        key = _keys_at(k, keys, begin, position, d, first, context, cell, key_head, KEY_HEADS, KEY_DIM)
        query = _queries_at(q, begin, position, d, first, context, key_head, KEY_HEADS, KEY_DIM)
        turned = tl.trans(_keys_at(k, keys, begin, other, d, first, context, cell, key_head, KEY_HEADS, KEY_DIM))
        at_keys = tl.dot(key, turned, at_keys, input_precision="ieee")
        at_queries = tl.dot(query, turned, at_queries, input_precision="ieee")
    return at_keys, at_queries


@kernel
def _next_state(
    k, keys, sums, decays, written, state, target, is_read, in_block, last, begin, chunk, first, context, cell, head,
    key_head, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the state after a whole chunk to `target`, which may be `state`."""
    tile = tl.arange(0, TILE)
    for start in range(0, KEY_DIM, STEP):
        d = start + tl.arange(0, STEP)
        part = tl.load(state + d[:, None] * VALUE_DIM, mask=(d < KEY_DIM)[:, None] & is_read, other=0.0) * tl.exp(last)
        for earlier in range(chunk, chunk + CHUNK, TILE):
            other = earlier + tile
            key = _keys_at(k, keys, begin, other, d, first, context, cell, key_head, KEY_HEADS, KEY_DIM)
            before = _sums_at(sums, decays, begin, other, first, context, cell, head, VALUE_HEADS)
            update = tl.load(written + (other % CHUNK)[:, None] * VALUE_DIM, mask=in_block, other=0.0)
            part = tl.dot(tl.trans(key * tl.exp(last - before)[:, None]), update, part, input_precision="ieee")
        tl.store(target + d[:, None] * VALUE_DIM, part, mask=(d < KEY_DIM)[:, None] & in_block)


@kernel(varying=("chunks", "every"))
def _recurrence_kernel(
    q, k, v, strengths, sums, out, starts, contexts, slots, reads, writes, states, keys, updates, decays, chunks, every,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A sequence's rows of one head and block of values. The state stays in memory, since registers are too few."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if begin == end:
        return
    context = tl.load(contexts + sequence)
    first = context - (end - begin)
    slot, source = tl.load(slots + sequence).to(tl.int64), tl.load(reads + sequence).to(tl.int64)
    write, key_head = tl.load(writes + sequence).to(tl.int64), head // (VALUE_HEADS // KEY_HEADS)
    tile, e = tl.arange(0, TILE), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_block = (e < VALUE_DIM)[None, :]
    of_head = states + head * KEY_DIM * VALUE_DIM + e[None, :]
    ENTRY: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    for start in range(first // TILE * TILE, context, TILE):
        position, chunk = start + tile, start // CHUNK * CHUNK
        cell = slot * chunks + start // CHUNK % chunks
        written = updates + (cell * VALUE_HEADS + head) * CHUNK * VALUE_DIM + e[None, :]
        is_read = (e < tl.where(source < 0, 0, VALUE_DIM))[None, :]
        total = _sums_at(sums, decays, begin, position, first, context, cell, head, VALUE_HEADS)
        old, result = _read_state(
            q, k, keys, of_head + source * ENTRY, is_read, begin, position, first, context, cell, key_head,
            KEY_HEADS, KEY_DIM, VALUE_DIM, TILE, STEP, BLOCK_V,
        )  # fmt: skip
        old, result = old * tl.exp(total)[:, None], result * tl.exp(total)[:, None]
        for earlier in range(chunk, start, TILE):
            other = earlier + tile
            at_keys, at_queries = _read_keys(
                q, k, keys, begin, position, other, first, context, cell, key_head, KEY_HEADS, KEY_DIM, TILE, STEP
            )
            before = _sums_at(sums, decays, begin, other, first, context, cell, head, VALUE_HEADS)
            decay = tl.exp(total[:, None] - before[None, :])
            update = tl.load(written + (other % CHUNK)[:, None] * VALUE_DIM, mask=in_block, other=0.0)
            old = tl.dot(at_keys * decay, update, old, input_precision="ieee")
            result = tl.dot(at_queries * decay, update, result, input_precision="ieee")
        at_keys, at_queries = _read_keys(
            q, k, keys, begin, position, position, first, context, cell, key_head, KEY_HEADS, KEY_DIM, TILE, STEP
        )
        decay = tl.exp(tl.where(tile[None, :] > tile[:, None], 0.0, total[:, None] - total[None, :]))
        at_keys, at_queries = at_keys * decay, at_queries * decay
        is_old, is_new = (position < first)[:, None], (position >= first) & (position < context)
        line = (begin + position - first).to(tl.int64) * VALUE_HEADS + head
        new_block = is_new[:, None] & in_block
        value = tl.load(v + line[:, None] * VALUE_DIM + e[None, :], mask=new_block, other=0.0)
        strength = tl.load(strengths + line, mask=is_new, other=0.0)[:, None]
        own = written + (position % CHUNK)[:, None] * VALUE_DIM
        known = tl.load(own, mask=is_old & in_block, other=0.0)
        # A later row is selected away, not multiplied by zero: it may be NaN.
        for index in range(0, tl.minimum(TILE, context - start)):
            update = tl.where(is_old, known, strength * (value - old))
            one = tl.sum(tl.where((tile == index)[:, None], update, 0.0), 0)[None, :]
            at_key = tl.sum(tl.where((tile == index)[None, :], at_keys, 0.0), 1)[:, None]
            at_query = tl.sum(tl.where((tile == index)[None, :], at_queries, 0.0), 1)[:, None]
            old = tl.where((tile > index)[:, None], tl.fma(at_key, one, old), old)
            result = tl.where((tile >= index)[:, None], tl.fma(at_query, one, result), result)
        tl.store(out + line[:, None] * VALUE_DIM + e[None, :], result.to(out.dtype.element_ty), mask=new_block)
        tl.store(own, strength * (value - old), mask=new_block)
        tl.debug_barrier()  # other threads read the updates
        boundary = start + TILE
        if (boundary == chunk + CHUNK) & (boundary <= context):
            target = write + tl.where(every != 0, boundary // CHUNK, 0)
            # Packed sequences need no state at their end, and have no entry for it.
            in_target = (e < tl.where((every != 0) & (boundary == context), 0, VALUE_DIM))[None, :]
            last = tl.sum(tl.where(tile == TILE - 1, total, 0.0), 0)
            _next_state(
                k, keys, sums, decays, written, of_head + source * ENTRY, of_head + target * ENTRY, is_read, in_target,
                last, begin, chunk, first, context, cell, head, key_head,
                KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TILE, STEP,
            )  # fmt: skip
            source = target
            tl.debug_barrier()  # the next chunk reads the state, and may have the same cells


def block_of(dim: int) -> int:
    """Features of keys in one step of a product, or of values in one program."""
    return min(32, max(16, triton.next_power_of_2(dim)))


def recur(rows: Rows, terms: DeltaTerms, places: Places, kept: Kept, out: Tensor) -> None:
    """Writes outputs, updates and states."""
    block_v = block_of(terms.value_dim)
    launch(
        _recurrence_kernel, (len(places.contexts), terms.value_heads, triton.cdiv(terms.value_dim, block_v)),
        *rows, out, *places[:5], kept.states, kept.keys, kept.updates, kept.decays, kept.keys.shape[1],
        int(places.every), **sizes_of(terms), TILE=TILE, STEP=block_of(terms.key_dim), BLOCK_V=block_v,
        num_warps=4, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


def paged(mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, places: Places, kept: Kept) -> Tensor:
    """As `delta_cache.paged_delta`."""
    mixed, b, a = mixed.contiguous(), b.contiguous(), a.contiguous()
    out = mixed.new_zeros(len(mixed), terms.value_heads, terms.value_dim)
    count = len(places.contexts)
    if not (len(mixed) and count):
        return out
    row_sequences = sequence_of_rows(places.starts, len(mixed))
    rows = compute_rows(mixed, b, a, terms, row_sequences, places, kept)
    recur(rows, terms, places, kept, out)
    keep_rows(mixed, rows, terms, row_sequences, places, kept)
    return out


def packed(mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, starts: Tensor) -> tuple[Tensor, Tensor]:
    """As `delta.delta`: the outputs, and the states at the beginnings of all chunks but the sequences' first."""
    mixed, b, a = mixed.contiguous(), b.contiguous(), a.contiguous()
    out = mixed.new_zeros(len(mixed), terms.value_heads, terms.value_dim)
    count = len(starts) - 1
    states = new_states(terms, len(mixed), count)
    if not (len(mixed) and count):
        return out, states
    places = whole_sequences(starts)
    kept = without_cache(mixed, states, new_updates(terms, count))
    rows = compute_rows(mixed, b, a, terms, sequence_of_rows(starts, len(mixed)), places, kept)
    recur(rows, terms, places, kept, out)
    return out, states


def whole_sequences(starts: Tensor) -> Places:
    lengths = starts.diff()
    counts = (lengths + (CHUNK.value - 1)) // CHUNK.value
    writes = counts.cumsum(0, dtype=torch.int32) - counts
    slots = torch.arange(len(lengths), dtype=torch.int32, device=starts.device)
    return Places(starts, lengths, slots, torch.full_like(slots, -1), writes, every=True)


def without_cache(mixed: Tensor, states: Tensor, updates: Tensor) -> Kept:
    """Sequences from position 0 read nothing that a slot keeps: any tensors of the right types stand in."""
    return Kept(states, mixed[:1, None], states[:1, None], updates, states, mixed[:, None])


def new_states(terms: DeltaTerms, rows: int, sequences: int) -> Tensor:
    """An entry for every chunk of packed sequences: at most one more than whole ones per sequence."""
    shape = rows // CHUNK.value + sequences, terms.value_heads, terms.key_dim, terms.value_dim
    return torch.empty(shape, dtype=torch.float32, device=terms.conv.device)


def new_updates(terms: DeltaTerms, slots: int) -> Tensor:
    shape = slots, terms.value_heads, CHUNK.value, terms.value_dim
    return torch.empty(shape, dtype=torch.float32, device=terms.conv.device)
