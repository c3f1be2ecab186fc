"""The delta rule under context parallelism: ranks exchange tokens for heads.

A recurrence over tokens that are divided among ranks would make each rank wait for the one before it. Heads are
independent: each rank receives its share of the key heads, with their value heads, of all tokens, computes whole
sequences, and sends every rank its tokens' outputs. So all ranks work at once, and the bits are those of one process.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lockstep import ops
from lockstep.ops.delta import delta
from lockstep.parallel.exchange import exchanged, swap_rows


class SharedTokens(NamedTuple):
    """Packed sequences whose tokens are divided among the ranks of `group`."""

    group: dist.ProcessGroup
    places: Int[Tensor, "tokens"]
    """The index of each token of the packed sequences among all ranks' rows, equally many each, in rank order."""
    starts: Int[Tensor, "sequences+1"]
    """Where the sequences begin, int32, and the end of the last."""


def delta_by_heads(
    mixed: Float[Tensor, "local channels"],
    b: Float[Tensor, "local value_heads"],
    a: Float[Tensor, "local value_heads"],
    terms: ops.DeltaTerms,
    tokens: SharedTokens,
) -> Float[Tensor, "local value_heads value_dim"]:
    """`ops.delta` of this rank's rows; rows that are none of `tokens.places` are padding. All ranks of the group call
    it together.

    A rank's gradients of the terms are those of its heads, and zero for the others.
    """
    ranks, rank = tokens.group.size(), tokens.group.rank()
    most = -(-terms.key_heads // ranks)
    heads = slice(min(rank * most, terms.key_heads), min((rank + 1) * most, terms.key_heads))
    per_key = terms.value_heads // terms.key_heads
    widths = terms.key_dim, terms.key_dim, per_key * terms.value_dim, per_key, per_key  # per key head
    parts = *mixed.split(terms.parts, 1), b, a

    def by_rank(part: Tensor, width: int) -> Tensor:
        return F.pad(part, (0, ranks * most * width - part.shape[1])).unflatten(1, (ranks, -1))

    sent = torch.cat([by_rank(part, width) for part, width in zip(parts, widths)], 2)
    rows = exchanged(sent.transpose(0, 1).flatten(0, 1), tokens.group, swap_rows, swap_rows)
    rows = rows.index_select(0, tokens.places)
    out = _whole_sequences(rows, terms, heads, most, widths, tokens.starts)
    out = F.pad(out, (0, most * widths[2] - out.shape[1]))
    out = out.new_zeros(ranks * len(mixed), out.shape[1]).index_copy(0, tokens.places, out)
    out = exchanged(out, tokens.group, swap_rows, swap_rows).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)
    return out[:, : terms.value_heads * terms.value_dim].unflatten(1, (terms.value_heads, -1)).contiguous()


def _whole_sequences(
    rows: Tensor, terms: ops.DeltaTerms, heads: slice, most: int, widths: tuple[int, ...], starts: Tensor
) -> Float[Tensor, "tokens values"]:
    """The outputs of some key heads, of whose rows there is room for `most`."""
    count = heads.stop - heads.start
    received = rows.split([most * width for width in widths], 1)
    q, k, v, b, a = (part[:, : count * width] for part, width in zip(received, widths))
    own = terms.of_heads(heads)
    if not count:
        # Part of the graph, since other ranks' backward passes exchange with this one, and add its gradients.
        return q * (own.conv.sum() + own.log_rates.sum() + own.step_bias.sum()).to(q.dtype)
    return delta(torch.cat((q, k, v), 1), b.contiguous(), a.contiguous(), own, starts).flatten(1)
