"""Sequences shared by ranks: each computes some of their tokens, and attends to the keys and values of all.

Every sequence is cut into twice as many chunks as there are ranks, and a rank takes one from its start and one from
its end: equally many tokens, and equally many keys to attend to. In each layer keys and values are gathered, put
back into the order of the sequences, and attended to in the fixed blocks, so a token's bits are those of one process.
Between forward and backward a rank keeps its own keys and values alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from lockstep import ops
from lockstep.ops import one_order
from lockstep.ops.attention import attend_backward
from lockstep.ops.kept import keep
from lockstep.parallel.exchange import all_gather, gather_rows, reduce_scatter
from lockstep.parallel.one_order import ContextRows

Piece = tuple[int, int, int]
"""Sequence, first token, and the token behind the last."""


def cut_sequences(lengths: Sequence[int], ranks: int) -> list[list[Piece]]:
    """Each rank's pieces of packed sequences, in their order: `ranks` shares of tokens that differ by one at most.

    Of a sequence in 2·ranks chunks, rank r has chunk r and chunk 2·ranks - 1 - r, so that causal attention is equal
    work for all. Tokens left over by the division go to the ranks that have fewest.
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

    Each rank brings its tokens in the order of `rows`, padded to `padded_rows`.
    """

    def __init__(
        self, lengths: Sequence[int], group: dist.ProcessGroup, device: str | torch.device = "cpu", multiple: int = 1
    ):
        """multiple: of which `padded_rows` is one."""
        self.group = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        shares = cut_sequences(lengths, ranks)
        self.pieces = ops.PieceAttention(lengths, shares[rank], device)
        rows = [_rows(lengths, share) for share in shares]
        self.rows: Int[Tensor, "own"] = rows[rank].to(device)
        """Of the packed row's tokens, this rank's."""
        self.padded_rows = -(-max(len(r) for r in rows) // multiple) * multiple
        # Where the token of each place in the packed row is found among all ranks' padded rows.
        gathered = torch.cat([r * self.padded_rows + torch.arange(len(own)) for r, own in enumerate(rows)])
        self._places = gathered[torch.cat(rows).argsort()].to(device)
        self.shares = rows
        self.shared_tokens = ContextRows(group, self.padded_rows, self._places, self.rows)
        self.predictors: Int[Tensor, "targets"] = torch.arange(0, device=device)
        """Which of the packed row's tokens are scored, in the order of their targets."""

    @cached_property
    def shared_targets(self) -> ContextRows:
        """The ranks' shares of the row's targets; made only where gradients are summed in one order."""
        predictors = self.predictors
        of_rank = [torch.isin(predictors.cpu(), share).nonzero()[:, 0] for share in self.shares]
        padded = max(map(len, of_rank))
        gathered = torch.cat([rank * padded + torch.arange(len(own)) for rank, own in enumerate(of_rank)])
        places = gathered[torch.cat(of_rank).argsort()].to(predictors.device)
        own = of_rank[dist.get_rank(self.group)].to(predictors.device)
        return ContextRows(self.group, padded, places, own)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _GatheredAttention.apply(q, k, v, self)
        return self.pieces.forward(q, *self.gather(k, v))[0]

    def gather(
        self, k: Float[Tensor, "own kv_heads head_dim"], v: Float[Tensor, "own kv_heads head_dim"]
    ) -> tuple[Float[Tensor, "tokens kv_heads head_dim"], Float[Tensor, "tokens kv_heads head_dim"]]:
        """All ranks' keys and values, in the order of the packed sequences."""
        own = torch.stack((k, v), 1)
        everyone = own.new_empty(dist.get_world_size(self.group) * own.shape[0], *own.shape[1:])
        all_gather(everyone, own, group=self.group)
        return everyone[:, 0].index_select(0, self._places), everyone[:, 1].index_select(0, self._places)

    def sum_back(
        self, grad_k: Float[Tensor, "tokens kv_heads head_dim"], grad_v: Float[Tensor, "tokens kv_heads head_dim"]
    ) -> tuple[Float[Tensor, "own kv_heads head_dim"], Float[Tensor, "own kv_heads head_dim"]]:
        """Back from `gather`, for gradients: those of this rank's tokens, summed over all ranks."""
        shape = 2, *grad_k.shape[1:]
        everyone = grad_k.new_zeros(dist.get_world_size(self.group) * self.padded_rows, *shape)
        everyone[:, 0].index_copy_(0, self._places, grad_k)
        everyone[:, 1].index_copy_(0, self._places, grad_v)
        own = grad_k.new_empty(self.padded_rows, *shape)
        reduce_scatter(own, everyone, group=self.group)
        return own[:, 0], own[:, 1]


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: ContextAttention) -> Tensor:
        out, log_sums = keep("attention", lambda: attention.pieces.forward(q, *attention.gather(k, v)))
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.attention = attention
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, log_sums = ctx.saved_tensors
        if one_order.is_asked():
            grad_q, grad_k, grad_v = _in_one_order(ctx.attention, grads[0], q, k, v, out, log_sums)
            return grad_q, grad_k, grad_v, None
        keys, values = ctx.attention.gather(k, v)
        grad_q, grad_keys, grad_values = ctx.attention.pieces.backward(grads[0], q, keys, values, out, log_sums)
        grad_k, grad_v = ctx.attention.sum_back(grad_keys, grad_values)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _in_one_order(
    attention: ContextAttention, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's rows. Each rank makes those of some key-value heads, of all queries in one order."""
    tokens, ranks = attention.shared_tokens, dist.get_world_size(attention.group)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    own = tokens.part(kv_heads)
    queries = slice(own.start * group, own.stop * group)

    def of_heads(x: Tensor, heads: slice) -> Tensor:
        return tokens.gather(x)[:, heads].contiguous()

    parts = [of_heads(x, queries) for x in (grad_out, q)] + [of_heads(x, own) for x in (k, v)]
    parts += [of_heads(x, queries) for x in (out, log_sums)]
    made: tuple[Tensor, ...] = (parts[1], *parts[2:4])  # where no head is left for this rank
    if own.stop > own.start:
        made = attend_backward(
            parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], attention.pieces.whole.starts
        )
    most = -(-kv_heads // ranks)  # key-value heads of a rank
    return (
        _own_rows(made[0], q, most * group, attention),
        _own_rows(made[1], k, most, attention),
        _own_rows(made[2], v, most, attention),
    )


def _own_rows(part: Tensor, like: Tensor, most: int, attention: ContextAttention) -> Tensor:
    """This rank's rows of all heads, from each rank's part `[tokens, up to most heads, head_dim]`, shaped as `like`."""
    padded = part.new_zeros(part.shape[0], most, part.shape[2])
    padded[:, : part.shape[1]] = part
    everyone = gather_rows(padded[None], attention.group).unbind()
    whole = torch.zeros_like(like)
    whole[: len(attention.rows)] = torch.cat(everyone, 1)[attention.rows, : like.shape[1]]
    return whole


def _rows(lengths: Sequence[int], pieces: Sequence[Piece]) -> Tensor:
    """The packed row's tokens in `pieces`."""
    starts = [0, *accumulate(lengths)]
    return torch.cat([torch.arange(0), *(torch.arange(starts[s] + a, starts[s] + b) for s, a, b in pieces)])
