"""Recording the experts that each mixture chooses in a forward pass, and replaying recorded choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Weigh = Callable[[Tensor], Tensor]
"""Computes the weights of each token's chosen experts."""


@dataclass
class ReplayedRoutes:
    """Experts that the mixtures use for some rows, instead of those the routers choose."""

    rows: Int[Tensor, "rows"]
    chosen: Sequence[Int[Tensor, "rows active"]]
    """Experts of each mixture, in layer order. A row's set of experts is replayed, not their order."""
    different: list[Bool[Tensor, "rows"]] = field(default_factory=list)
    """For each mixture so far, the rows for which its router chose other experts."""
    next: int = 0
    """Index of the next mixture."""


_recorded: ContextVar[list[Tensor] | None] = ContextVar("recorded_routes", default=None)
_replayed: ContextVar[ReplayedRoutes | None] = ContextVar("replayed_routes", default=None)


@contextmanager
def recorded_routes() -> Iterator[list[Int[Tensor, "tokens active"]]]:
    """Collects the experts of all rows from each call of `route` in this context, in order."""
    routes: list[Tensor] = []
    token = _recorded.set(routes)
    try:
        yield routes
    finally:
        _recorded.reset(token)


def note_routes(routes: Sequence[Int[Tensor, "tokens active"]]) -> None:
    """Records choices made without calling `route`: those of a replayed graph, whose next replay overwrites them."""
    if (recorded := _recorded.get()) is not None:
        recorded.extend(each.clone() for each in routes)


@contextmanager
def replayed_routes(routes: ReplayedRoutes) -> Iterator[None]:
    """In this context, each call of `route` uses the next of `routes`: for one forward pass, in which only `repeatable`
    functions may run twice."""
    token = _replayed.set(routes)
    try:
        yield
    finally:
        _replayed.reset(token)


def repeatable(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, with every call replaying the routes that are next now, also in a backward pass."""
    if (replayed := _replayed.get()) is None:
        return forward
    first = replayed.next

    def run(*arguments: Any, **named: Any) -> Tensor:
        replayed.next = first
        with replayed_routes(replayed):
            return forward(*arguments, **named)

    return run


def replay_and_record(logits: Tensor, weights: Tensor, chosen: Tensor, weigh: Weigh) -> tuple[Tensor, Tensor]:
    """Records a router's choice, after replacing it where routes are replayed: the weights and experts to use."""
    if (replayed := _replayed.get()) is not None:
        weights, chosen = _with(replayed, logits, weights, chosen, weigh)
    if (recorded := _recorded.get()) is not None:
        # Always a copy: compiled code may overwrite tensors that it no longer needs.
        recorded.append(chosen.to(route_dtype(logits.shape[1])))
    return weights, chosen


def route_dtype(experts: int) -> torch.dtype:
    """The dtype of expert indices in recorded routes."""
    return torch.uint8 if experts <= 256 else torch.int16


def _with(
    replayed: ReplayedRoutes, logits: Tensor, weights: Tensor, chosen: Tensor, weigh: Weigh
) -> tuple[Tensor, Tensor]:
    number, replayed.next = replayed.next, replayed.next + 1
    recorded = replayed.chosen[number].to(chosen)
    different = (recorded.sort(-1).values != chosen[replayed.rows].sort(-1).values).any(-1)
    replayed.different[number : number + 1] = [different]
    # Rows that agree keep their bits, including the order of their experts.
    rows, recorded = replayed.rows[different], recorded[different]
    if not len(rows):
        return weights, chosen
    order = logits[rows].gather(1, recorded).sort(dim=-1, descending=True, stable=True).indices
    chosen = chosen.index_copy(0, rows, recorded.gather(1, order))
    return weights.index_copy(0, rows, weigh(chosen)[rows]), chosen
