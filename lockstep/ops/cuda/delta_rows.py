"""What the gated delta rule's recurrence reads, in Triton: convolved, normed rows; and what a slot keeps of them.

A row is computed entirely in one program per head, from its own inputs, those of the tokens before it that the
convolution reads, and the decays of its chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops import delta_reference
from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.delta_reference import DeltaTerms

CHUNK, EPS = tl.constexpr(delta_reference.CHUNK), tl.constexpr(delta_reference.EPS)
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


def keep_rows(mixed: Tensor, rows: Rows, terms: DeltaTerms, row_sequences: Tensor, places: Places, kept: Kept) -> None:
    """Writes into the slots what the next step reads of these rows, over what this step's recurrence read."""
    group = terms.value_heads // terms.key_heads
    launch(
        _keep_kernel, (len(mixed), terms.key_heads),
        mixed, rows.k, rows.sums, row_sequences, places.starts, places.contexts, places.slots,
        kept.keys, kept.decays, kept.inputs, len(places.contexts), kept.inputs.shape[1], kept.keys.shape[1],
        **sizes_of(terms), BLOCK_K=triton.next_power_of_2(terms.key_dim), BLOCK_H=triton.next_power_of_2(group),
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
