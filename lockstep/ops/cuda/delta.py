"""The gated delta rule in Triton: one kernel for training, prefill and decode.

Packed sequences are a step from position 0, so all forms launch the same compiled variants: of the rows (convolution,
norms, decays), of the recurrence, and of what a slot keeps. The recurrence takes 16 rows at a time, at multiples of 16
from position 0. So a row always has the same place in its tile, whether it is alone there, as in decode, or not: the
same instructions run, and rows of a product never mix. A row reads the state at its chunk's beginning, then the
chunk's earlier tiles in ascending order, then its tile's rows up to it, each with one multiply-add.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops import delta_reference
from lockstep.ops.cuda.attention_backward import sequence_of_rows
from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.delta_reference import DeltaTerms

CHUNK, EPS = tl.constexpr(delta_reference.CHUNK), tl.constexpr(delta_reference.EPS)
TILE = 16
"""Rows of the recurrence at a time: the fewest that a product may have."""
ELEMENTS = 2048
"""Elements of a tile of rows."""


class Places(NamedTuple):
    """Of a step's sequences, int32 each; as in `DeltaStep`."""

    starts: Tensor
    contexts: Tensor
    slots: Tensor
    reads: Tensor
    writes: Tensor
    """If `every` state is kept, the entry of a sequence's first chunk; its chunks' states are at this and the next."""
    every: bool = False


class Kept(NamedTuple):
    """One layer's tensors, as `DeltaCache.layer` has them."""

    states: Tensor
    state_inputs: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    inputs: Tensor


class Rows(NamedTuple):
    """What the recurrence reads, float32."""

    q: Tensor
    """`[rows, key_heads, key_dim]`, as `k`."""
    k: Tensor
    v: Tensor
    """`[rows, value_heads, value_dim]`."""
    strengths: Tensor
    """`[rows, value_heads]`, as `sums`."""
    sums: Tensor
    """Of the log-decays of the chunk's rows up to each."""


@kernel
def _log_decay(a, bias, rate):
    """-rate · softplus(a + bias). ln(1 + x) = 2 artanh(x / (2 + x)), within 1e-7 of its size also where 1 + x is 1."""
    step = a + bias
    x = tl.exp(-tl.abs(step))
    z = x / (2.0 + x)
    w = z * z
    y = w * 0.15384615384615385 + 0.18181818181818182
    y = y * w + 0.2222222222222222
    y = y * w + 0.2857142857142857
    y = y * w + 0.4
    y = y * w + 0.6666666666666666
    y = y * w + 2.0
    # Comparisons propagate NaN.
    return -rate * (tl.where(step < 0.0, 0.0, step) + z * y)


@kernel(varying=("rows", "sequences", "kept", "chunks", "every"))
def _rows_kernel(
    mixed, b, a, conv, log_rates, step_bias, q, k, v, strengths, sums, row_sequences, starts, contexts, slots, reads,
    writes, state_inputs, inputs, decays, rows, sequences, kept, chunks, every,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of one head: the heads of queries come first, then those of keys, then those of values."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head, d = tl.program_id(1), tl.arange(0, BLOCK)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    sequence = tl.load(row_sequences + row, mask=row < rows, other=sequences)
    inside = sequence < sequences
    begin = tl.load(starts + sequence, mask=inside, other=0)
    context = tl.load(contexts + sequence, mask=inside, other=0)
    first = context - (tl.load(starts + sequence + 1, mask=inside, other=0) - begin)
    slot = tl.load(slots + sequence, mask=inside, other=0).to(tl.int64)
    read = tl.load(reads + sequence, mask=inside, other=-1).to(tl.int64)
    write = tl.load(writes + sequence, mask=inside, other=0).to(tl.int64)
    position = first + (row - begin).to(tl.int32)
    boundary = first // CHUNK * CHUNK
    is_value = head >= 2 * KEY_HEADS
    value_head = tl.maximum(head - 2 * KEY_HEADS, 0)
    channel = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM, head * KEY_DIM) + d
    in_head = d < tl.where(is_value, VALUE_DIM, KEY_DIM)
    # The last row before the last boundary has the inputs that the state's entry keeps.
    is_kept = position + 1 == tl.where(every != 0, 0, context // CHUNK * CHUNK)
    x = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        source = position - back
        in_step, in_slot = source >= first, (source < first) & (source >= boundary)
        in_state = (source < boundary) & (read >= 0)
        of_step = tl.load(
            mixed + (row - back)[:, None] * CHANNELS + channel[None, :],
            mask=(inside & in_step)[:, None] & in_head[None, :], other=0.0,
        )  # fmt: skip
        of_slot = tl.load(
            inputs + (slot * kept + source % kept)[:, None] * CHANNELS + channel[None, :],
            mask=(inside & in_slot)[:, None] & in_head[None, :], other=0.0,
        )  # fmt: skip
        of_state = tl.load(
            state_inputs + (read * (WIDTH - 1) + WIDTH - 1 + source - boundary)[:, None] * CHANNELS + channel[None, :],
            mask=(inside & in_state)[:, None] & in_head[None, :], other=0.0,
        )  # fmt: skip
        value = tl.where(in_step[:, None], of_step, tl.where(in_slot[:, None], of_slot, of_state))
        if tap > 0:
            tl.store(
                state_inputs + (write * (WIDTH - 1) + tap - 1)[:, None] * CHANNELS + channel[None, :], value,
                mask=(inside & is_kept)[:, None] & in_head[None, :],
            )  # fmt: skip
        weight = tl.load(conv + channel * WIDTH + tap, mask=in_head, other=0.0).to(tl.float32)
        x = tl.fma(value.to(tl.float32), weight[None, :], x)
    x = x / (1.0 + tl.exp(-x))
    mask = inside[:, None] & in_head[None, :]
    if is_value:
        tl.store(v + (row * VALUE_HEADS + value_head)[:, None] * VALUE_DIM + d[None, :], x, mask=mask)
        line = row * VALUE_HEADS + value_head
        strength = 1.0 / (1.0 + tl.exp(-tl.load(b + line, mask=inside, other=0.0).to(tl.float32)))
        tl.store(strengths + line, strength, mask=inside)
        rate = tl.exp(tl.load(log_rates + value_head).to(tl.float32))
        bias = tl.load(step_bias + value_head).to(tl.float32)
        # One chain from the chunk's beginning, whose rows before this step are in the slot.
        chunk = position // CHUNK * CHUNK
        cell = ((slot * chunks + chunk // CHUNK % chunks) * VALUE_HEADS + value_head) * CHUNK + (first - 1) % CHUNK
        total = tl.load(decays + cell, mask=inside & (chunk < first), other=0.0)
        new = tl.where(inside, position - tl.maximum(chunk, first) + 1, 0)
        for index in range(0, tl.max(new, 0)):
            place = (row - new + 1 + index) * VALUE_HEADS + value_head
            step = tl.load(a + place, mask=index < new, other=0.0).to(tl.float32)
            total = tl.where(index < new, total + _log_decay(step, bias, rate), total)
        tl.store(sums + line, total, mask=inside)
    else:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) + EPS)
        place = (row * KEY_HEADS + head % KEY_HEADS)[:, None] * KEY_DIM + d[None, :]
        if head < KEY_HEADS:
            tl.store(q + place, x * scale[:, None] * (KEY_DIM**-0.5), mask=mask)
        else:
            tl.store(k + place, x * scale[:, None], mask=mask)


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
    """A sequence's rows of one head and block of values. The state stays in memory: a program has no registers for it."""
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


@kernel(varying=("sequences", "kept", "chunks"))
def _keep_kernel(
    mixed, k, sums, row_sequences, starts, contexts, slots, keys, decays, inputs, sequences, kept, chunks,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a row's part of one key head into its slot, unless a later row of the step has the same place."""
    row, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(row_sequences + row)
    if sequence >= sequences:
        return
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PART: tl.constexpr = 2 * KEY_DIM + GROUP * VALUE_DIM
    context, slot = tl.load(contexts + sequence), tl.load(slots + sequence).to(tl.int64)
    position = context - (tl.load(starts + sequence + 1) - row).to(tl.int32)
    if position + kept >= context:
        target = slot * kept + position % kept
        for start in tl.static_range(0, PART, BLOCK):
            place = start + tl.arange(0, BLOCK)
            channel = key_head * PART + place
            value = tl.load(mixed + row * (KEY_HEADS * PART) + channel, mask=place < PART, other=0.0)
            tl.store(inputs + target * (KEY_HEADS * PART) + channel, value, mask=place < PART)
    if position + CHUNK * chunks >= context:
        cell = slot * chunks + position // CHUNK % chunks
        d, h = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_H)
        key = tl.load(k + (row * KEY_HEADS + key_head) * KEY_DIM + d, mask=d < KEY_DIM, other=0.0)
        target = ((cell * KEY_HEADS + key_head) * KEY_DIM + d) * CHUNK + position % CHUNK
        tl.store(keys + target, key, mask=d < KEY_DIM)
        head = key_head * GROUP + h
        total = tl.load(sums + row * VALUE_HEADS + head, mask=h < GROUP, other=0.0)
        tl.store(decays + (cell * VALUE_HEADS + head) * CHUNK + position % CHUNK, total, mask=h < GROUP)


def sizes_of(terms: DeltaTerms) -> dict[str, int]:
    heads, dims = (terms.key_heads, terms.value_heads), (terms.key_dim, terms.value_dim)
    return dict(zip(("KEY_HEADS", "VALUE_HEADS", "KEY_DIM", "VALUE_DIM"), (*heads, *dims)))


def block_of(dim: int) -> int:
    """Features of keys in one step of a product, or of values in one program."""
    return min(32, max(16, triton.next_power_of_2(dim)))


def compute_rows(
    mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, row_sequences: Tensor, places: Places, kept: Kept
) -> Rows:
    count, heads = len(mixed), terms.value_heads
    q, k = (mixed.new_empty(count, terms.key_heads, terms.key_dim, dtype=torch.float32) for _ in range(2))
    v = mixed.new_empty(count, heads, terms.value_dim, dtype=torch.float32)
    strengths, sums = (mixed.new_empty(count, heads, dtype=torch.float32) for _ in range(2))
    block = triton.next_power_of_2(max(terms.key_dim, terms.value_dim))
    height = max(1, ELEMENTS // block)
    # No fusion: variants must not round products and sums differently.
    launch(
        _rows_kernel, (triton.cdiv(count, height), 2 * terms.key_heads + heads),
        mixed, b, a, terms.conv.contiguous(), terms.log_rates, terms.step_bias, q, k, v, strengths, sums,
        row_sequences, *places[:5], kept.state_inputs, kept.inputs, kept.decays, count, len(places.contexts),
        kept.inputs.shape[1], kept.keys.shape[1], int(places.every),
        **sizes_of(terms), WIDTH=terms.conv.shape[1], ROWS=height, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return Rows(q, k, v, strengths, sums)


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
    group = terms.value_heads // terms.key_heads
    launch(
        _keep_kernel, (len(mixed), terms.key_heads),
        mixed, rows.k, rows.sums, row_sequences, places.starts, places.contexts, places.slots,
        kept.keys, kept.decays, kept.inputs, count, kept.inputs.shape[1], kept.keys.shape[1],
        **sizes_of(terms), BLOCK_K=triton.next_power_of_2(terms.key_dim), BLOCK_H=triton.next_power_of_2(group),
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
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
