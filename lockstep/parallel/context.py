"""Context parallelism: each rank computes some tokens of every sequence, and attends to all keys and values.

Every sequence is split into twice as many chunks as ranks, and each rank has one chunk from its start and one from its
end: equally many tokens, and equally many keys to attend to. In each layer, keys and values are gathered, reordered by
position, and attended to in the fixed blocks, so a token's bits are those of one process. Between forward and backward,
a rank stores only its local keys and values. Layers with the delta rule exchange heads instead (`context_delta`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lockstep import ops
from lockstep.ops import one_order
from lockstep.ops.attention_gradient import Attended, Gradients, attend_backward, sink_gradient
from lockstep.ops.attention_reference import PLAIN
from lockstep.ops.saved_outputs import saved_output
from lockstep.parallel.context_delta import SharedTokens, delta_by_heads
from lockstep.parallel.exchange import all_gather, gather_rows, reduce_scatter
from lockstep.parallel.one_order import ContextRows

Piece = tuple[int, int, int]
"""Index of the sequence, first token, and the token after the last."""


def split_sequences(lengths: Sequence[int], ranks: int) -> list[list[Piece]]:
    """Each rank's pieces of packed sequences, in order: `ranks` shares whose token counts differ by at most one.

    Rank r has chunks r and 2·ranks - 1 - r of a sequence in 2·ranks chunks, so that causal attention is equal work for
    all. The remainder of the division goes to the ranks with the fewest tokens.
    """
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    extras = [0] * ranks
    for sequence, length in enumerate(lengths):
        size, left = divmod(length, 2 * ranks)
        sizes = [size] * (2 * ranks)
        for _ in range(left):
            rank = extras.index(min(extras))
            extras[rank] += 1
            sizes[rank] += 1
        stops = list(accumulate(sizes))
        for chunk, (size, stop) in enumerate(zip(sizes, stops)):
            if size:
                shares[min(chunk, 2 * ranks - 1 - chunk)].append((sequence, stop - size, stop))
    return shares


class ContextAttention:
    """The attention of one rank's share of packed sequences. The ranks of `group` call it together, layer by layer.

    Each rank passes its tokens in the order of `rows`, padded to `padded_rows` or more.
    """

    row_counts: Int[Tensor, "local"] | None = None
    """As in `ops.PackedAttention`, for this rank's rows."""

    def __init__(
        self, lengths: Sequence[int], group: dist.ProcessGroup, device: str | torch.device = "cpu", multiple: int = 1
    ):
        """multiple: `padded_rows` is a multiple of this."""
        self.group = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        shares = split_sequences(lengths, ranks)
        self.pieces = ops.PieceAttention(lengths, shares[rank], device)
        rows = [_rows(lengths, share) for share in shares]
        self.rows: Int[Tensor, "local"] = rows[rank].to(device)
        """This rank's tokens of the packed row."""
        self.padded_rows = -(-max(len(r) for r in rows) // multiple) * multiple
        # The index of each token of the packed row among all ranks' padded rows.
        gathered = torch.cat([r * self.padded_rows + torch.arange(len(local)) for r, local in enumerate(rows)])
        self._places = gathered[torch.cat(rows).argsort()].to(device)
        self.shares = rows
        self.shared_tokens = ContextRows(group, self.padded_rows, self._places, self.rows)
        self.predictors: Int[Tensor, "targets"] = torch.arange(0, device=device)
        """Which of the packed row's tokens are scored, in the order of their targets."""

    @cached_property
    def shared_targets(self) -> ContextRows:
        """The ranks' shares of the row's targets; used only if gradients are summed in one order."""
        predictors = self.predictors
        of_rank = [torch.isin(predictors.cpu(), share).nonzero()[:, 0] for share in self.shares]
        padded = max(map(len, of_rank))
        gathered = torch.cat([rank * padded + torch.arange(len(local)) for rank, local in enumerate(of_rank)])
        places = gathered[torch.cat(of_rank).argsort()].to(predictors.device)
        local = of_rank[dist.get_rank(self.group)].to(predictors.device)
        return ContextRows(self.group, padded, places, local)

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        terms: ops.Terms = PLAIN,
    ) -> Tensor:
        if (more := len(q) - self.padded_rows) > 0:  # a pipeline pads its micro-batches to one length
            rows = slice(self.padded_rows)
            out = self(layer, q[rows], k[rows], None if v is None else v[rows], terms)
            return F.pad(out, (0, 0, 0, 0, 0, more))
        inputs = (q, k, v, terms.sinks)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
            return _GatheredAttention.apply(q, k, v, terms.sinks, self, terms._replace(sinks=None))
        return self.pieces.forward(q, *self.gather(k, v), terms)[0]

    def delta(self, layer: int, mixed: Tensor, b: Tensor, a: Tensor, terms: ops.DeltaTerms) -> Tensor:
        if (more := len(mixed) - self.padded_rows) > 0:
            rows = slice(self.padded_rows)
            return F.pad(self.delta(layer, mixed[rows], b[rows], a[rows], terms), (0, 0, 0, 0, 0, more))
        tokens = SharedTokens(self.group, self._places, self.pieces.whole.starts)
        return delta_by_heads(mixed, b, a, terms, tokens)

    def gather(
        self, k: Float[Tensor, "local kv_heads head_dim"], v: Float[Tensor, "local kv_heads head_dim"] | None
    ) -> tuple[Float[Tensor, "tokens kv_heads head_dim"], Float[Tensor, "tokens kv_heads head_dim"] | None]:
        """All ranks' keys and values, in the order of the packed sequences."""
        local = torch.stack((k,) if v is None else (k, v), 1)
        gathered = local.new_empty(dist.get_world_size(self.group) * local.shape[0], *local.shape[1:])
        all_gather(gathered, local, group=self.group)
        keys = gathered[:, 0].index_select(0, self._places)
        return keys, None if v is None else gathered[:, 1].index_select(0, self._places)

    def sum_back(
        self,
        grad_k: Float[Tensor, "tokens kv_heads head_dim"],
        grad_v: Float[Tensor, "tokens kv_heads head_dim"] | None,
    ) -> tuple[Float[Tensor, "local kv_heads head_dim"], Float[Tensor, "local kv_heads head_dim"] | None]:
        """The backward of `gather`: the gradients of this rank's tokens, summed over all ranks."""
        parts = (grad_k,) if grad_v is None else (grad_k, grad_v)
        shape = len(parts), *grad_k.shape[1:]
        scattered = grad_k.new_zeros(dist.get_world_size(self.group) * self.padded_rows, *shape)
        for index, part in enumerate(parts):
            scattered[:, index].index_copy_(0, self._places, part)
        local = grad_k.new_empty(self.padded_rows, *shape)
        reduce_scatter(local, scattered, group=self.group)
        return local[:, 0], None if grad_v is None else local[:, 1]


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        sinks: Tensor | None,
        attention: ContextAttention,
        terms: ops.Terms,
    ) -> Tensor:
        with_sinks = terms._replace(sinks=sinks)
        out, log_sums = saved_output(
            "attention", lambda: attention.pieces.forward(q, *attention.gather(k, v), with_sinks)
        )
        ctx.save_for_backward(q, k, v, out, log_sums, sinks)
        ctx.attention, ctx.terms = attention, terms
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None, None]:
        q, k, v, out, log_sums, sinks = ctx.saved_tensors
        if one_order.is_required():
            return *_ordered_gradients(ctx.attention, grads[0], q, k, v, out, log_sums, ctx.terms, sinks), None, None
        pieces = ctx.attention.pieces
        keys, values = ctx.attention.gather(k, v)
        attended = Attended(q, keys, values, out, log_sums)
        grad_q, grad_keys, grad_values = pieces.backward(grads[0], attended, ctx.terms)
        grad_k, grad_v = ctx.attention.sum_back(grad_keys, grad_values)
        of_sinks = None
        if sinks is not None:
            of_sinks = sink_gradient(grads[0], out, log_sums, sinks, pieces.tokens)
        return grad_q, grad_k.to(k.dtype), None if grad_v is None else grad_v.to(k.dtype), of_sinks, None, None


def _ordered_gradients(
    attention: ContextAttention,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    terms: ops.Terms,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of this rank's rows, in one order: each rank computes some key-value heads, for all queries.

    The gradient of `sinks` is complete for these heads, and zero for the others. Takes one argument per tensor of the
    backward pass.
    """
    tokens, ranks = attention.shared_tokens, dist.get_world_size(attention.group)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    local = tokens.part(kv_heads)
    queries = slice(local.start * group, local.stop * group)

    def of_heads(x: Tensor, heads: slice) -> Tensor:
        return tokens.gather(x)[:, heads].contiguous()

    grad, query = (of_heads(x, queries) for x in (grad_out, q))
    key, value = of_heads(k, local), None if v is None else of_heads(v, local)
    attended, sums = (of_heads(x, queries) for x in (out, log_sums))
    gradients: Gradients = (query, key, value)  # empty, if there are fewer heads than ranks
    of_sinks = None if sinks is None else torch.zeros_like(sinks)
    if local.stop > local.start:
        starts = attention.pieces.whole.starts
        gradients = attend_backward(grad, Attended(query, key, value, attended, sums), starts, terms=terms)
        if sinks is not None and of_sinks is not None:
            of_sinks[queries] = sink_gradient(grad, attended, sums, sinks[queries], len(attended))
    most = -(-kv_heads // ranks)  # key-value heads per rank
    return (
        _local_rows(gradients[0], q, most * group, attention),
        _local_rows(gradients[1], k, most, attention),
        None if gradients[2] is None else _local_rows(gradients[2], k, most, attention),
        of_sinks,
    )


def _local_rows(part: Tensor, like: Tensor, most: int, attention: ContextAttention) -> Tensor:
    """This rank's rows of all heads, shaped as `like`, from each rank's `part` `[tokens, up to most heads,
    head_dim]`."""
    padded = part.new_zeros(part.shape[0], most, part.shape[2])
    padded[:, : part.shape[1]] = part
    all_parts = gather_rows(padded[None], attention.group).unbind()
    whole = torch.zeros_like(like)
    whole[: len(attention.rows)] = torch.cat(all_parts, 1)[attention.rows, : like.shape[1]]
    return whole


def _rows(lengths: Sequence[int], pieces: Sequence[Piece]) -> Tensor:
    """The packed row's tokens in `pieces`."""
    starts = [0, *accumulate(lengths)]
    return torch.cat([torch.arange(0), *(torch.arange(starts[s] + a, starts[s] + b) for s, a, b in pieces)])
