"""The gradient of the gated delta rule over packed sequences in Triton.

The forward pass keeps the states at the beginnings of chunks; all else is computed again, chunk by chunk at the same
time. Then one kernel goes back through each sequence's chunks for the gradients of states and updates, and the others
have a program per chunk or tile of rows. Nothing is added atomically, so a gradient's bits are the same in every run.

With the names of `delta_reference.extend`, y_i = β_i du_i, D_ij = e^{G_i - G_j}, dS' the gradient of the next state:
du_j = Σ_{i≥j} D_ij (q_i · k_j) do_i - Σ_{i>j} D_ij (k_i · k_j) y_i + e^{G_e - G_j} dS'ᵀ k_j,
dS = e^{G_e} dS' + Σ_i e^{G_i} (q_i do_iᵀ - k_i y_iᵀ),
dq_i = e^{G_i} S do_i + Σ_{j≤i} D_ij (do_i · u_j) k_j,
dk_i = -e^{G_i} S y_i - Σ_{j<i} D_ij (y_i · u_j) k_j
       + Σ_{j≥i} D_ji (do_j · u_i) q_j - Σ_{j>i} D_ji (y_j · u_i) k_j + e^{G_e - G_i} dS' u_i.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda import delta
from lockstep.ops.cuda.attention_backward import sequence_of_rows
from lockstep.ops.cuda.delta_rows import CHUNK, Places, compute_rows, sizes_of
from lockstep.ops.cuda.delta_rows_backward import features_of, input_gradients
from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.delta_reference import DeltaTerms


@kernel
def _products(
    q, k, line, inside, other, other_inside, KEY_DIM: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Of keys with other queries and keys."""
    at_queries, at_keys = tl.zeros((TILE, TILE), dtype=tl.float32), tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, KEY_DIM, STEP):
        d = start + tl.arange(0, STEP)
        key = features_of(k, line, inside, d, KEY_DIM)
        query, other_key = (
            features_of(q, other, other_inside, d, KEY_DIM),
            features_of(k, other, other_inside, d, KEY_DIM),
        )
        at_queries = tl.dot(key, tl.trans(query), at_queries, input_precision="ieee")
        at_keys = tl.dot(key, tl.trans(other_key), at_keys, input_precision="ieee")
    return at_queries, at_keys


@kernel
def _updates_kernel(
    q, k, strengths, sums, grad_out, starts, first_chunks, grad_states, grad_updates,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of a sequence's updates, and of the state after each chunk."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    key_head, tile = head // (VALUE_HEADS // KEY_HEADS), tl.arange(0, TILE)
    e = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_block, count = (e < VALUE_DIM)[None, :], (end - begin + CHUNK - 1) // CHUNK
    for index in range(0, count):
        chunk = count - 1 - index
        entry = (tl.load(first_chunks + sequence) + chunk).to(tl.int64) * VALUE_HEADS + head
        top = begin + chunk * CHUNK
        stop = tl.minimum(top + CHUNK, end)
        state = grad_states + entry * (KEY_DIM * VALUE_DIM) + e[None, :]
        written = grad_updates + entry * (CHUNK * VALUE_DIM) + e[None, :]
        last = tl.load(sums + (stop - 1).to(tl.int64) * VALUE_HEADS + head)
        for back in range(0, CHUNK, TILE):
            start = CHUNK - TILE - back
            row = (top + start + tile).to(tl.int64)
            inside, line = row < stop, row * VALUE_HEADS + head
            total = tl.load(sums + line, mask=inside, other=0.0)
            grad = tl.zeros((TILE, BLOCK_V), dtype=tl.float32)
            for at in range(0, KEY_DIM, STEP):
                d = at + tl.arange(0, STEP)
                part = tl.load(state + d[:, None] * VALUE_DIM, mask=(d < KEY_DIM)[:, None] & in_block, other=0.0)
                key = features_of(k, row * KEY_HEADS + key_head, inside, d, KEY_DIM)
                grad = tl.dot(key, part, grad, input_precision="ieee")
            grad = grad * tl.where(inside, tl.exp(last - total), 0.0)[:, None]
            for later in range(start + TILE, CHUNK, TILE):
                other = (top + later + tile).to(tl.int64)
                other_inside, other_line = other < stop, other * VALUE_HEADS + head
                at_queries, at_keys = _products(
                    q, k, row * KEY_HEADS + key_head, inside, other * KEY_HEADS + key_head, other_inside,
                    KEY_DIM, TILE, STEP,
                )  # fmt: skip
                other_total = tl.load(sums + other_line, mask=other_inside, other=0.0)
                both = inside[:, None] & other_inside[None, :]
                decay = tl.where(both, tl.exp(other_total[None, :] - total[:, None]), 0.0)
                grad = tl.dot(
                    at_queries * decay, features_of(grad_out, other_line, other_inside, e, VALUE_DIM), grad,
                    input_precision="ieee",
                )  # fmt: skip
                strength = tl.load(strengths + other_line, mask=other_inside, other=0.0)[:, None]
                known = tl.load(
                    written + (later + tile)[:, None] * VALUE_DIM, mask=other_inside[:, None] & in_block, other=0.0
                )
                grad = tl.dot(at_keys * -decay, strength * known, grad, input_precision="ieee")
            at_queries, at_keys = _products(
                q, k, row * KEY_HEADS + key_head, inside, row * KEY_HEADS + key_head, inside, KEY_DIM, TILE, STEP
            )
            seen = (tile[None, :] >= tile[:, None]) & inside[None, :]
            decay = tl.where(seen, tl.exp(tl.where(seen, total[None, :] - total[:, None], 0.0)), 0.0)
            grad = tl.dot(
                at_queries * decay, features_of(grad_out, line, inside, e, VALUE_DIM), grad, input_precision="ieee"
            )
            at_keys = at_keys * decay
            strength = tl.load(strengths + line, mask=inside, other=0.0)[:, None]
            for above in range(0, TILE):
                place = TILE - 1 - above
                one = tl.sum(tl.where((tile == place)[:, None], strength * grad, 0.0), 0)[None, :]
                at_key = tl.sum(tl.where((tile == place)[None, :], at_keys, 0.0), 1)[:, None]
                grad = tl.where((tile < place)[:, None], grad - at_key * one, grad)
            tl.store(written + (start + tile)[:, None] * VALUE_DIM, grad, mask=inside[:, None] & in_block)
            tl.debug_barrier()  # other threads read them
        if chunk > 0:
            former = state - VALUE_HEADS * KEY_DIM * VALUE_DIM
            for at in range(0, KEY_DIM, STEP):
                d = at + tl.arange(0, STEP)
                in_part = (d < KEY_DIM)[:, None] & in_block
                part = tl.load(state + d[:, None] * VALUE_DIM, mask=in_part, other=0.0) * tl.exp(last)
                for start in range(0, CHUNK, TILE):
                    row = (top + start + tile).to(tl.int64)
                    inside, line = row < stop, row * VALUE_HEADS + head
                    grown = tl.exp(tl.load(sums + line, mask=inside, other=0.0))[:, None]
                    query = features_of(q, row * KEY_HEADS + key_head, inside, d, KEY_DIM) * grown
                    key = features_of(k, row * KEY_HEADS + key_head, inside, d, KEY_DIM) * grown
                    strength = tl.load(strengths + line, mask=inside, other=0.0)[:, None]
                    known = tl.load(
                        written + (start + tile)[:, None] * VALUE_DIM, mask=inside[:, None] & in_block, other=0.0
                    )
                    grad = features_of(grad_out, line, inside, e, VALUE_DIM)
                    part = tl.dot(tl.trans(query), grad, part, input_precision="ieee")
                    part = tl.dot(tl.trans(-key), strength * known, part, input_precision="ieee")
                tl.store(former + d[:, None] * VALUE_DIM, part, mask=in_part)
            tl.debug_barrier()


@kernel(varying=("rows",))
def _chunks_kernel(
    q, k, strengths, sums, grad_out, starts, reads, states, grad_states, updates, grad_updates,
    grad_q, grad_k, grad_v, grad_b, grad_decays, rows,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr, STEP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's rows of one head, of a block of key features; of decays, this block's share."""
    chunk, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, stop = tl.load(starts + chunk), tl.load(starts + chunk + 1)
    if begin == stop:
        return
    place, d = tl.arange(0, SIZE), block * STEP + tl.arange(0, STEP)
    row, key_head = (begin + place).to(tl.int64), head // (VALUE_HEADS // KEY_HEADS)
    inside, line = row < stop, row * VALUE_HEADS + head
    entry, read = chunk.to(tl.int64) * VALUE_HEADS + head, tl.load(reads + chunk).to(tl.int64)
    query = features_of(q, row * KEY_HEADS + key_head, inside, d, KEY_DIM)
    key = features_of(k, row * KEY_HEADS + key_head, inside, d, KEY_DIM)
    total = tl.load(sums + line, mask=inside, other=0.0)
    strength = tl.load(strengths + line, mask=inside, other=0.0)
    last = tl.load(sums + (stop - 1).to(tl.int64) * VALUE_HEADS + head)
    at_out, at_keys = tl.zeros((SIZE, SIZE), dtype=tl.float32), tl.zeros((SIZE, SIZE), dtype=tl.float32)
    of_query, reading = tl.zeros((SIZE, STEP), dtype=tl.float32), tl.zeros((SIZE, STEP), dtype=tl.float32)
    written, of_state = tl.zeros((SIZE, STEP), dtype=tl.float32), tl.zeros((STEP,), dtype=tl.float32)
    of_strength, features = tl.zeros((SIZE,), dtype=tl.float32), tl.arange(0, BLOCK_V)
    for start in range(0, VALUE_DIM, BLOCK_V):
        e = start + features
        grad = features_of(grad_out, line, inside, e, VALUE_DIM)
        update = features_of(updates, entry * CHUNK + place, inside, e, VALUE_DIM)
        of_update = features_of(grad_updates, entry * CHUNK + place, inside, e, VALUE_DIM)
        value = strength[:, None] * of_update
        state_line = head * KEY_DIM + d
        state = features_of(
            states, read * (VALUE_HEADS * KEY_DIM) + state_line, d < tl.where(read < 0, 0, KEY_DIM), e, VALUE_DIM
        )
        after = features_of(grad_states, entry * KEY_DIM + d, d < KEY_DIM, e, VALUE_DIM)
        of_state += tl.sum(state * after, 1)
        at_out = tl.dot(grad, tl.trans(update), at_out, input_precision="ieee")
        at_keys = tl.dot(value, tl.trans(update), at_keys, input_precision="ieee")
        of_query = tl.dot(grad, tl.trans(state), of_query, input_precision="ieee")
        reading = tl.dot(value, tl.trans(state), reading, input_precision="ieee")
        written = tl.dot(update, tl.trans(after), written, input_precision="ieee")
        if block == 0:
            of_strength += tl.sum(of_update * update, 1)
            mask = inside[:, None] & (e < VALUE_DIM)[None, :]
            tl.store(grad_v + line[:, None] * VALUE_DIM + e[None, :], value, mask=mask)
    if block == 0:
        # dβ_i is du_i · u_i / β_i, and the sigmoid's derivative β_i (1 - β_i).
        tl.store(grad_b + line, of_strength * (1.0 - strength), mask=inside)
    grown = tl.exp(total)[:, None]
    of_query, reading = of_query * grown, reading * -grown
    written = written * tl.where(inside, tl.exp(last - total), 0.0)[:, None]
    seen = (place[None, :] <= place[:, None]) & inside[:, None]
    decay = tl.where(seen, tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
    before = place[None, :] < place[:, None]
    at_out, at_keys = at_out * decay, tl.where(before, -at_keys * decay, 0.0)
    # The decay of row n is in what rows from n on read of rows before it, and of the state; and in what is left of the
    # rows before it and of the state at the chunk's end.
    pairs = at_out * tl.dot(query, tl.trans(key), input_precision="ieee")
    pairs += at_keys * tl.dot(key, tl.trans(key), input_precision="ieee")
    of_decay = tl.sum(tl.where(before, tl.cumsum(pairs, 0, reverse=True), 0.0), 1)
    of_decay += tl.cumsum(tl.sum(query * of_query + key * reading, 1), 0, reverse=True)
    of_decay += tl.sum(tl.where(before, tl.sum(key * written, 1)[None, :], 0.0), 1) + tl.exp(last) * tl.sum(of_state, 0)
    of_query = tl.dot(at_out, key, of_query, input_precision="ieee")
    reading = tl.dot(at_keys, key, reading, input_precision="ieee")
    written = tl.dot(tl.trans(at_out), query, written, input_precision="ieee")
    written = tl.dot(tl.trans(at_keys), key, written, input_precision="ieee")
    mask = inside[:, None] & (d < KEY_DIM)[None, :]
    tl.store(grad_q + line[:, None] * KEY_DIM + d[None, :], of_query, mask=mask)
    tl.store(grad_k + line[:, None] * KEY_DIM + d[None, :], reading + written, mask=mask)
    tl.store(grad_decays + block.to(tl.int64) * rows * VALUE_HEADS + line, of_decay, mask=inside)


def packed_backward(
    grad_out: Tensor, mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, starts: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the arguments of `delta.packed`, in their dtypes. states: as it returned them."""
    grad_out, mixed, b, a = grad_out.contiguous(), mixed.contiguous(), b.contiguous(), a.contiguous()
    if not (len(mixed) and len(starts) > 1):
        return tuple(torch.zeros_like(x) for x in (mixed, b, a, *terms[:3]))  # type: ignore[return-value]
    row_sequences = sequence_of_rows(starts, len(mixed))
    grad_q, grad_k, grad_v, grad_b, grad_decays = _of_rows(grad_out, mixed, b, a, terms, starts, row_sequences, states)
    grad_mixed, grad_conv = input_gradients(mixed, terms, starts, row_sequences, grad_q, grad_k, grad_v)
    # g = -e^rates softplus(a + bias)
    step, rate = a.float() + terms.step_bias.float(), -terms.log_rates.float().exp()
    grad_step = grad_decays * rate * step.sigmoid()
    grad_rates = (grad_decays * rate * torch.nn.functional.softplus(step)).sum(0)
    weights = (grad_conv.to(terms.conv.dtype), grad_rates.to(terms.log_rates.dtype))
    return grad_mixed, grad_b.to(b.dtype), grad_step.to(a.dtype), *weights, grad_step.sum(0).to(terms.step_bias.dtype)


def _of_rows(
    grad_out: Tensor, mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, starts: Tensor, row_sequences: Tensor,
    states: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of normed queries and keys for each head of values, of values, of b and of the log-decays, float32."""
    sizes, count, chunks = sizes_of(terms), len(mixed), len(states)
    whole = delta.whole_sequences(starts)
    pieces = _chunks_of(whole, chunks)
    kept = delta.without_cache(mixed, states, delta.new_updates(terms, chunks))
    rows = compute_rows(mixed, b, a, terms, row_sequences, whole, kept)
    delta.recur(rows, terms, pieces, kept, torch.empty_like(grad_out))
    grad_states, grad_updates = torch.zeros_like(states), torch.empty_like(kept.updates)
    step, block_v = delta.block_of(terms.key_dim), delta.block_of(terms.value_dim)
    known = rows.q, rows.k, rows.strengths, rows.sums, grad_out
    launch(
        _updates_kernel, (len(whole.contexts), terms.value_heads, triton.cdiv(terms.value_dim, block_v)),
        *known, starts, whole.writes, grad_states, grad_updates,
        **sizes, TILE=delta.TILE, STEP=step, BLOCK_V=block_v, num_warps=4, num_stages=1,
    )  # fmt: skip
    blocks, lines = triton.cdiv(terms.key_dim, step), (count, terms.value_heads)
    grad_q, grad_k = (rows.q.new_empty(*lines, terms.key_dim) for _ in range(2))
    grad_v, grad_b, grad_decays = torch.empty_like(rows.v), rows.q.new_zeros(lines), rows.q.new_zeros(blocks, *lines)
    launch(
        _chunks_kernel, (chunks, terms.value_heads, blocks),
        *known, pieces.starts, pieces.reads, states, grad_states, kept.updates, grad_updates,
        grad_q, grad_k, grad_v, grad_b, grad_decays, count,
        **sizes, SIZE=CHUNK.value, STEP=step, BLOCK_V=block_v, num_warps=8, num_stages=1,
    )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_b, grad_decays.sum(0)


def _chunks_of(whole: Places, count: int) -> Places:
    """The chunks of packed sequences as sequences, of which those after the last chunk are empty."""
    starts, first_chunks = whole.starts, whole.writes
    chunk = torch.arange(count, dtype=torch.int32, device=starts.device)
    # An empty sequence has the same first chunk as the next.
    sequence = torch.searchsorted(first_chunks, chunk, right=True) - 1
    index = chunk - first_chunks[sequence]
    first_rows = torch.minimum(starts[sequence] + index * CHUNK.value, starts[sequence + 1])
    rows = torch.cat((first_rows, starts[-1:]))
    reads = torch.where(index > 0, chunk, -1)
    return Places(rows, rows.diff(), chunk, reads, torch.zeros_like(chunk), every=True)
