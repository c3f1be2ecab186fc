"""Attention in plain PyTorch: it defines the compiled forms, and replaces them where there is no compiler.

Query rows are gathered in tiles of one sequence each, so that each key block is one product for all tiles that have
keys there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.ops import plain
from lockstep.ops.cache_codes import CODES, widened_keys, widened_values, write_codes

TILE = 64


class Terms(NamedTuple):
    """A layer's attention parameters, besides queries, keys and values."""

    scale: float | None = None
    """Factor of the scores; None: 1 / √head_dim."""
    window: int = 0
    """Number of keys that a query sees, including the one at its position; 0: all."""
    sinks: Tensor | None = None
    """A learned score per head without a key; it only adds to the sum of weights (arXiv 2309.17453)."""

    def factor(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.scale is None else float(self.scale)


PLAIN = Terms()


def write_pages_reference(k: Tensor, v: Tensor | None, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
    """Writes rows `[tokens, kv_heads, head_dim]` into the slots (page · page size + offset) of the pages.

    A value that is not finite is written as zero, and its key as NaN. Queries that see the key get NaN; for the others,
    its score is masked, and its weight of zero meets a finite value. Without values, the keys are the values.
    """
    if keys.dtype == CODES:
        assert v is not None and values is not None
        return write_codes(k, v, slots, keys, values)
    page_size = keys.shape[3]
    page, offset = slots // page_size, slots % page_size
    finite = (k if v is None else v).isfinite().all(-1, keepdim=True)
    keys[page, :, :, offset] = torch.where(finite, k, torch.nan)
    if v is not None and values is not None:
        values[page, :, offset] = torch.where(finite, v, 0.0)


# Over 60 lines: one loop whose running state would be the parameters of any part of it.
def attend_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    table: Tensor,
    starts: Tensor,
    contexts: Tensor,
    block: int,
    terms: Terms = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Attended values, shaped as `q`, and the log-sums `[tokens, heads]`. Shapes as in `PagedAttention`."""
    tokens, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = torch.zeros_like(q)
    log_sums = torch.zeros(tokens, heads, dtype=torch.float32, device=q.device)
    sequence, first_row, row_count = _tiles(starts)
    if not len(sequence):
        return out, log_sums
    width = int(row_count.max())
    # [tiles, width]: each tile's token rows; past a tile's end, its last one is repeated.
    rows = first_row[:, None] + torch.minimum(torch.arange(width, device=q.device), row_count[:, None] - 1)
    positions = rows + (contexts - starts[1:]).long()[sequence][:, None]
    queries = q[rows].reshape(-1, width, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
    queries = queries.reshape(-1, kv_heads, width * group, head_dim).float() * terms.factor(head_dim)
    row_position = positions.repeat_interleave(group, 1)

    shape = queries.shape[:3]
    highest = queries.new_full(shape, float("-inf"))
    total, attended = queries.new_zeros(shape), torch.zeros_like(queries)
    if terms.sinks is not None:
        # The sink is a key before all others, whose value is zero.
        highest[:] = terms.sinks.float().view(kv_heads, 1, group).expand(-1, width, -1).flatten(1)
        total.fill_(1.0)
    first_position, last_position = positions[:, 0], positions[:, -1]
    for start in range(0, int(last_position.max()) + 1, block):
        active = last_position >= start
        if terms.window:
            active &= first_position - terms.window < start + block - 1
        active = active.nonzero()[:, 0]
        if not len(active):
            continue
        key, value = _key_block(keys, values, table[sequence[active]], contexts[sequence[active]], start, block)
        scores = plain.product(queries[active].flatten(0, 1), key, fused=False).view(len(active), kv_heads, -1, block)
        key_position, position = start + torch.arange(block, device=q.device), row_position[active][:, None, :, None]
        seen = key_position <= position
        if terms.window:
            seen &= key_position > position - terms.window
        scores = scores.masked_fill(~seen, float("-inf"))
        before = highest[active]
        now = torch.maximum(before, scores.amax(-1))
        weights = plain.exp(scores - now[..., None])
        shrink = plain.exp(before - now)
        if terms.window:
            # If a row's window begins in a later block than that of its tile's first row, -inf - -inf is NaN.
            blind = ~seen.any(-1)
            weights, shrink = weights.masked_fill(blind[..., None], 0.0), shrink.masked_fill(blind, 1.0)
        highest[active] = now
        total[active] = total[active] * shrink + plain.row_sum(weights)
        product = plain.product(weights.flatten(0, 1), value, fused=False).view(len(active), kv_heads, -1, head_dim)
        attended[active] = attended[active] * shrink[..., None] + product
    attended = attended / total[..., None]
    sums = highest + plain.log(total)
    valid = torch.arange(width, device=q.device) < row_count[:, None]
    attended = attended.view(-1, kv_heads, width, group, head_dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    sums = sums.view(-1, kv_heads, width, group).permute(0, 2, 1, 3).flatten(2, 3)
    out[rows[valid]] = attended[valid].to(q.dtype)
    log_sums[rows[valid]] = sums[valid]
    return out, log_sums


def _key_block(
    keys: Tensor, values: Tensor | None, table: Tensor, contexts: Tensor, start: int, block: int
) -> tuple[Tensor, Tensor]:
    """Keys `[tiles * kv_heads, head_dim, block]` and values `[…, block, head_dim]` from position `start` on, float32.

    `table` and `contexts` are those of the tiles' sequences.
    """
    page_size = keys.shape[3]
    pages_per_block = block // page_size
    pages = table[:, start // page_size : start // page_size + pages_per_block].long()
    pages = torch.nn.functional.pad(pages, (0, pages_per_block - pages.shape[1]))
    key, value = keys[pages], None if values is None else values[pages]  # [tiles, pages, kv_heads, …]
    if key.dtype == CODES:
        assert value is not None
        key, value = widened_keys(key), widened_values(key, value)
    kv_heads, head_dim = key.shape[2:4]
    key = key.permute(0, 2, 3, 1, 4).reshape(len(table) * kv_heads, head_dim, block).float()
    if value is None:  # a key is written as NaN where its value is not finite
        value = torch.where(key.isnan(), 0.0, key).mT.view(len(table), kv_heads, block, head_dim)
    else:
        value = value.permute(0, 2, 1, 3, 4).reshape(len(table), kv_heads, block, head_dim).float()
    # Past the sequence's end, a page contains stale values.
    past_end = start + torch.arange(block, device=keys.device) >= contexts[:, None]
    return key, value.masked_fill(past_end[:, None, :, None], 0.0).flatten(0, 1)


def _tiles(starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence, first token row and number of token rows of each tile."""
    tiles = [
        (sequence, row, min(TILE, end - row))
        for sequence, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist()))
        for row in range(start, end, TILE)
    ]
    columns = torch.tensor(tiles, dtype=torch.int64, device=starts.device).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


# More than eight parameters: each tensor that the forward saved, as in the compiled forms.
def attend_backward_reference(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    contexts: Tensor,
    first_keys: Tensor,
    terms: Terms = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `q`, in its dtype, and of `k` and `v` in float32. Tile by tile: no T×T matrix is materialized.

    The query rows from `starts[i]` to `starts[i + 1]` are the last of `contexts[i]` keys, which start at
    `first_keys[i]`.
    """
    head_dim, kv_heads = q.shape[-1], k.shape[1]
    group, scale = q.shape[1] // kv_heads, terms.factor(head_dim)
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    deltas = (grad_out.float() * out.float()).sum(-1)

    def by_head(x: Tensor) -> Tensor:
        """[rows, heads, d] -> [kv_heads, rows * group, d] in float32."""
        return x.float().unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)

    sequence, first_row, row_count = (column.tolist() for column in _tiles(starts))
    ends, seen, firsts = starts[1:].tolist(), contexts.tolist(), first_keys.tolist()
    for piece, row, count in zip(sequence, first_row, row_count):
        stop = row + count
        keys = slice(firsts[piece], firsts[piece] + seen[piece])
        shift = keys.stop - ends[piece]  # from a query's row to the row of the key at its position
        query, grad = by_head(q[row:stop]), by_head(grad_out[row:stop])
        key, value = by_head(k[keys]), by_head(v[keys])
        place = torch.arange(row + shift, stop + shift, device=q.device).repeat_interleave(group)
        key_place = torch.arange(keys.start, keys.stop, device=q.device)
        hidden = key_place > place[:, None]
        if terms.window:
            hidden |= key_place <= place[:, None] - terms.window
        scores = (query @ key.mT * scale).masked_fill(hidden, float("-inf"))
        weights = torch.exp(scores - by_head(log_sums[row:stop, :, None]))
        grad_scores = weights * (grad @ value.mT - by_head(deltas[row:stop, :, None])) * scale
        grad_v[keys] += (weights.mT @ grad).transpose(0, 1)
        grad_k[keys] += (grad_scores.mT @ query).transpose(0, 1)
        query_grad = (grad_scores @ key).unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)
        grad_q[row:stop] = query_grad
    return grad_q.to(q.dtype), grad_k, grad_v
