"""Fewer key-value heads than tensor ranks: every rank has the weights of all heads, and attends with one head.

Several ranks share a head, each with some of its queries, and the gradient of its keys is a sum over all queries. The
ranks' parts of the sum are added in any order, except with `train.deterministic_layout`: then each of these ranks
computes the head's attention with all queries, and so the complete sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.model.decoder import Block, Projected
from lockstep.ops import one_order
from lockstep.parallel.exchange import exchanged, gather_rows


class OneKeyValueHead:
    """The halves of a block whose `heads` key-value heads are fewer than the ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup, heads: int):
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.share = self.ranks // heads
        """The number of ranks that attend with the same head."""
        self.first = self.rank // self.share * self.share
        """The first of them."""
        self.local = slice(self.rank // self.share, self.rank // self.share + 1)

    def before_attention(self, block: Block, hidden: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        if one_order.is_required():
            with self._in_one_order(block):
                q, k, v = block.before_attention(hidden, cos, sin)
            return exchanged(q, self.group, self._gather_queries, self._local_queries), k, v
        q, k, v = block.before_attention(hidden, cos, sin)
        return q, k[:, self.local].contiguous(), None if v is None else v[:, self.local].contiguous()

    def after_attention(self, block: Block, hidden: Tensor, attended: Tensor) -> Tensor:
        if one_order.is_required():
            attended = exchanged(attended, self.group, self._local_queries, self._gather_queries)
        return block.after_attention(hidden, attended)

    def local_outputs(self, weight: Tensor) -> Tensor:
        """The outputs of this rank's head, from a weight or bias of all heads' keys or values."""
        size = weight.shape[0] * self.share // self.ranks
        return weight[self.local.start * size :][:size]

    def part(self, outputs: int) -> slice:
        """The outputs of the head whose gradients this rank computes, as if its ranks sharded the weight."""
        size = outputs // self.share
        return slice((self.rank - self.first) * size, (self.rank - self.first + 1) * size)

    @contextmanager
    def _in_one_order(self, block: Block) -> Iterator[None]:
        """Within this context, `sharing` returns these halves for the parameters of the block's keys and values."""
        global _sharing, _shared
        before = _sharing, _shared
        attention = block.self_attn
        modules = [getattr(attention, name, None) for name in ("k_proj", "v_proj", "k_norm")]
        _sharing, _shared = self, [p for module in modules if module is not None for p in module.parameters()]
        try:
            yield
        finally:
            _sharing, _shared = before

    def _gather_queries(self, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The queries `[tokens, heads, head_dim]` of all ranks that share this rank's key-value head."""
        return torch.cat(gather_rows(local, group).chunk(self.ranks)[self.first : self.first + self.share], 1)

    def _local_queries(self, all_queries: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_queries.chunk(self.share, 1)[self.rank - self.first]


# Plain globals, as in `ops.one_order`: a block's two halves may be replayed in the thread of a backward pass.
_sharing: OneKeyValueHead | None = None
_shared: list[torch.nn.Parameter] = []


def sharing(parameter: Tensor) -> OneKeyValueHead | None:
    """The halves that share the outputs of `parameter`; None for other parameters, or if gradients have no fixed
    order."""
    return _sharing if any(parameter is each for each in _shared) else None
