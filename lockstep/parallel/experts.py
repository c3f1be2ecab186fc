"""Expert parallelism: each rank has some of the experts, unsharded; rows are sent to their experts and back.

    tokens ─ dispatch ─> rows by expert ─ send ─> rows of this rank's experts ─ feed-forward ─ send back ─ combine

The shared expert, which computes all tokens, runs while rows are in flight: on their way to the experts in the forward
pass, and while their gradients return in the backward pass.

No sum is split: a row's products are computed where its expert is, and a token's rows are added on the token's rank, in
the order of the token's experts, so its bits are those of one process. Received rows are ordered by expert, then by
source rank, then by token. If the ranks' tokens are consecutive, as on a tensor axis, that is the order of one process,
also for the sums over rows in the weights' gradients.

The number of rows sent is known only at run time, so a compiler sees operators with results of unknown size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ops import native
from lockstep.ops.experts import combine, dispatch, order_by_expert
from lockstep.ops.opaque import library
from lockstep.parallel.deep_ep import begin_exchange
from lockstep.parallel.exchange import InFlight, exchanged, gather_rows, group_named, rows_are_whole, swap_rows
from lockstep.parallel.expert_traffic import TRAFFIC

FeedForward = Callable[[Tensor, Tensor], Tensor]
"""The feed-forward of this rank's experts, of rows and the start of each expert's rows."""


def experts_over_ranks(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    count: int,
    group: dist.ProcessGroup,
    feed_forward: FeedForward,
    shared: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`ops.experts` of this rank's tokens, with their weights and choices; `feed_forward` has this rank's share of the
    `count` experts.

    `x`: these tokens, or those of all ranks of the tensor axis, which are neighbors in `group`. Within `whole_rows`,
    all ranks have the same tokens, and all get the result.
    """
    starts, places, sources = order_by_expert(chosen, count)
    starts = starts.cpu()  # for the lengths of messages
    if rows_are_whole():
        compiling = torch.compiler.is_compiling()
        take, gather = (_opaque_take, _opaque_gather) if compiling else (_take_rows, _gather_rows)
        local, local_starts = take(x, starts, sources, group.group_name)
        out = combine(gather(feed_forward(local, local_starts), starts, sources, group.group_name), weights, places)
        return out if shared is None else out + shared(x)
    rows = dispatch(_local_tokens(x, chosen.shape[0], group), places, sources)
    receive = _send_to_experts(rows, starts, group)
    shared_out = None if shared is None else shared(x)
    received, local_starts, counts = receive()
    out = combine(_send_back(feed_forward(received, local_starts), starts, counts, sources, group), weights, places)
    return out if shared_out is None else out + shared_out


def _local_tokens(x: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
    if x.shape[0] == tokens:
        return x
    ranks = x.shape[0] // tokens
    return x.unflatten(0, (ranks, -1))[dist.get_rank(group) % ranks]


def _send_to_experts(
    rows: Tensor, starts: Tensor, group: dist.ProcessGroup
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """Starts sending the rows. The returned function waits, and returns the rows of this rank's experts, the start of
    each expert's rows, and the number of rows per source rank and expert."""
    if torch.compiler.is_compiling():  # one operator: the compiler would decide what runs in between
        received = _opaque_send(rows, starts, group.group_name)
        return lambda: received
    exchange = _start_exchange(rows, starts, group)
    sent: Tensor = _Send.apply(rows, exchange)
    return lambda: (_Receive.apply(sent, exchange), exchange.local_starts, exchange.counts)


def _send_back(rows: Tensor, starts: Tensor, counts: Tensor, sources: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `_send_to_experts`: the rows of this rank's tokens, as many as `sources`."""
    if torch.compiler.is_compiling():
        return _opaque_return(rows, starts, counts, sources.shape[0], group.group_name)
    return exchanged(
        rows,
        group,
        lambda rows, group: _back(rows, starts, counts, len(sources), group),
        lambda grad, group: _out(grad, starts, counts, group),
    )


@dataclass
class _ExpertExchange:
    """Sends `length` rows to their experts, and their gradients back."""

    starts: Tensor
    counts: Tensor
    """`[ranks, experts]`: the rows from each rank for each of this rank's experts."""
    length: int
    group: dist.ProcessGroup
    in_flight: InFlight | None = None
    """Sent but not yet waited for: rows in the forward pass, gradients in the backward pass."""

    @property
    def local_starts(self) -> Tensor:
        """The start of each of this rank's experts' rows."""
        return torch.cat([self.counts.new_zeros(1), self.counts.sum(0).cumsum(0)])

    def take(self) -> InFlight:
        """Returns what is in flight, and drops it: the autograd graph keeps this object alive, but need not keep the
        rows."""
        assert self.in_flight is not None
        in_flight, self.in_flight = self.in_flight, None
        return in_flight


class _Send(torch.autograd.Function):
    """Its backward waits for the gradients that the backward of `_Receive` has started to send.

    Autograd runs in reverse order, so what is called between the two runs between them in the backward pass too.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _ExpertExchange) -> Tensor:
        ctx.exchange = exchange
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.take().wait(), None  # the memory of `grads`, which is filled now


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _ExpertExchange) -> Tensor:
        ctx.exchange = exchange
        return _by_local_expert(exchange.take().wait(), exchange.counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange: _ExpertExchange = ctx.exchange
        in_flight = _begin_back(grads[0], exchange.starts, exchange.counts, exchange.length, exchange.group)
        exchange.in_flight = in_flight
        return in_flight.received, None


def _start_exchange(rows: Tensor, starts: Tensor, group: dist.ProcessGroup) -> _ExpertExchange:
    local = starts.diff().view(dist.get_world_size(group), -1)
    counts = swap_rows(local, group)  # on the CPU, which needs the counts anyway
    in_flight = _begin_out(rows, starts, counts, group)
    TRAFFIC.note_call(len(in_flight.received), group)
    return _ExpertExchange(starts, counts, len(rows), group, in_flight)


def _out(rows: Tensor, starts: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _by_local_expert(_begin_out(rows, starts, counts, group).wait(), counts)


def _begin_out(rows: Tensor, starts: Tensor, counts: Tensor, group: dist.ProcessGroup) -> InFlight:
    sent, received = _lengths(len(rows), starts, counts, group)
    return _begin(rows, sent, received, group)


def _by_local_expert(rows: Tensor, counts: Tensor) -> Tensor:
    return rows if native.is_pretending() else rows.index_select(0, _by_expert(counts).to(rows.device))


def _back(rows: Tensor, starts: Tensor, counts: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    return _begin_back(rows, starts, counts, length, group).wait()


def _begin_back(rows: Tensor, starts: Tensor, counts: Tensor, length: int, group: dist.ProcessGroup) -> InFlight:
    sent, received = _lengths(length, starts, counts, group)
    if not native.is_pretending():
        rows = torch.empty_like(rows).index_copy_(0, _by_expert(counts).to(rows.device), rows)
    return _begin(rows, received, sent, group)


def _lengths(length: int, starts: Tensor, counts: Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """How many of this rank's `length` rows are sent to each rank, and how many are received from each."""
    ranks = dist.get_world_size(group)
    if native.is_pretending():  # evenly, since the choices have no values
        even = [length * (rank + 1) // ranks - length * rank // ranks for rank in range(ranks)]
        return even, even
    return starts[:: (len(starts) - 1) // ranks].diff().tolist(), counts.sum(1).tolist()


def _by_expert(counts: Tensor) -> Tensor:
    """The permutation from rows ordered by rank, then expert, to rows ordered by expert, then rank."""
    lengths = counts.T.flatten()
    before = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).T.flatten()
    shifts = before - (lengths.cumsum(0) - lengths)
    return shifts.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


def _begin(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> InFlight:
    remote = len(rows) - sent[dist.get_rank(group)]
    TRAFFIC.bytes += remote * rows.shape[1] * rows.element_size()
    return begin_exchange(rows, sent, received, group)


def _take_rows(x: Tensor, starts: Tensor, sources: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The rows of this rank's experts, from rows that all ranks have, and the start of each expert's rows."""
    group = group_named(name)
    share = (len(starts) - 1) // group.size()
    local = starts[group.rank() * share : (group.rank() + 1) * share + 1]
    active = len(sources) // max(len(x), 1)
    return x[sources[int(local[0]) : int(local[-1])] // max(active, 1)], local - local[0]


def _gather_rows(rows: Tensor, starts: Tensor, sources: Tensor, name: str) -> Tensor:
    """The rows of all experts, as many as `sources`, gathered from each rank's experts."""
    group = group_named(name)
    lengths = starts[:: (len(starts) - 1) // group.size()].diff().tolist()
    padded = rows.new_zeros(max(lengths), rows.shape[1])
    padded[: len(rows)] = rows
    parts = gather_rows(padded, group).unflatten(0, (group.size(), -1))
    return torch.cat([part[:length] for part, length in zip(parts, lengths)])


def _some_rows(like: Tensor) -> Tensor:
    return like.new_empty(torch.library.get_ctx().new_dynamic_size(), like.shape[1])


@library.operator(
    "send_to_experts(Tensor rows, Tensor starts, str group) -> (Tensor, Tensor, Tensor)",
    fake=lambda rows, starts, group: (
        _some_rows(rows),
        starts.new_empty((starts.shape[0] - 1) // group_named(group).size() + 1),
        starts.new_empty(group_named(group).size(), (starts.shape[0] - 1) // group_named(group).size()),
    ),
)
def _opaque_send(rows: Tensor, starts: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    exchange = _start_exchange(rows, starts, group_named(group))
    return _by_local_expert(exchange.take().wait(), exchange.counts), exchange.local_starts, exchange.counts


@library.operator(
    "return_from_experts(Tensor rows, Tensor starts, Tensor counts, SymInt length, str group) -> Tensor",
    fake=lambda rows, starts, counts, length, group: rows.new_empty(length, rows.shape[1]),
)
def _opaque_return(rows: Tensor, starts: Tensor, counts: Tensor, length: int, group: str) -> Tensor:
    return _back(rows, starts, counts, length, group_named(group))


@library.operator(
    "resend_to_experts(Tensor rows, Tensor starts, Tensor counts, SymInt length, str group) -> Tensor",
    fake=lambda rows, starts, counts, length, group: rows.new_empty(length, rows.shape[1]),
)
def _opaque_out(rows: Tensor, starts: Tensor, counts: Tensor, length: int, group: str) -> Tensor:
    return _out(rows, starts, counts, group_named(group))


def _save_send(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[1], output[2])
    ctx.length, ctx.group = inputs[0].shape[0], inputs[2]


def _save_return(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, str], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.length, ctx.group = inputs[0].shape[0], inputs[4]


library.differentiable(
    "send_to_experts",
    _save_send,
    lambda ctx, grad, *_: (_opaque_return(grad, *ctx.saved_tensors, ctx.length, ctx.group), None, None),
)
library.differentiable(
    "return_from_experts",
    _save_return,
    lambda ctx, grad: (_opaque_out(grad, *ctx.saved_tensors, ctx.length, ctx.group), None, None, None, None),
)
_opaque_take = library.operator(
    "take_own_experts_rows(Tensor x, Tensor starts, Tensor sources, str group) -> (Tensor, Tensor)",
    fake=lambda x, starts, sources, group: (
        _some_rows(x),
        starts.new_empty((starts.shape[0] - 1) // group_named(group).size() + 1),
    ),
)(_take_rows)
_opaque_gather = library.operator(
    "gather_experts_rows(Tensor rows, Tensor starts, Tensor sources, str group) -> Tensor",
    fake=lambda rows, starts, sources, group: rows.new_empty(sources.shape[0], rows.shape[1]),
)(_gather_rows)
