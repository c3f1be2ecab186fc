"""Recording which experts each mixture chooses in a forward pass, and replaying given ones."""

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
"""Computes the weights of given experts of each token."""


@dataclass
class ReplayedRoutes:
    """Experts that the mixtures use for some rows, instead of those they would choose."""

    rows: Int[Tensor, "rows"]
    chosen: Sequence[Int[Tensor, "rows active"]]
    """Experts of each mixture, in layer order; the set of a row's experts is replayed, not their order."""
    different: list[Bool[Tensor, "rows"]] = field(default_factory=list)
    """For each mixture so far, the rows for which it would have chosen other experts."""
    next: int = 0
    """The mixture that chooses next."""


_recorded: ContextVar[list[Tensor] | None] = ContextVar("recorded_routes", default=None)
_replayed: ContextVar[ReplayedRoutes | None] = ContextVar("replayed_routes", default=None)


@contextmanager
def recorded_routes() -> Iterator[list[Int[Tensor, "tokens active"]]]:
    """Collects the experts of all rows from each call of `route` within this context, in order."""
    routes: list[Tensor] = []
    token = _recorded.set(routes)
    try:
        yield routes
    finally:
        _recorded.reset(token)


def note_routes(routes: Sequence[Int[Tensor, "tokens active"]]) -> None:
    """Records the choices of `route` calls that are not made now: those in a replayed graph, which the next replay
    overwrites."""
    if (recorded := _recorded.get()) is not None:
        recorded.extend(each.clone() for each in routes)


@contextmanager
def replayed_routes(routes: ReplayedRoutes) -> Iterator[None]:
    """Within this context, each call of `route` uses the next of `routes`: for one forward pass, of which only what is
    `repeatable` is computed twice."""
    token = _replayed.set(routes)
    try:
        yield
    finally:
        _replayed.reset(token)


def repeatable(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, whose every call replays the same routes, those that are next now: in a backward pass too."""
    if (replayed := _replayed.get()) is None:
        return forward
    first = replayed.next

    def run(*arguments: Any, **named: Any) -> Tensor:
        replayed.next = first
        with replayed_routes(replayed):
            return forward(*arguments, **named)

    return run


def observed(logits: Tensor, weights: Tensor, chosen: Tensor, weigh: Weigh) -> tuple[Tensor, Tensor]:
    """The experts to use for a router's choice: the choice itself, unless routes are replayed."""
    if (replayed := _replayed.get()) is not None:
        weights, chosen = _with(replayed, logits, weights, chosen, weigh)
    if (recorded := _recorded.get()) is not None:
        # Always a copy: compiled code may overwrite what it no longer needs.
        recorded.append(chosen.to(route_dtype(logits.shape[1])))
    return weights, chosen


def route_dtype(experts: int) -> torch.dtype:
    """What holds the number of an expert in a route."""
    return torch.uint8 if experts <= 256 else torch.int16


def _with(
    replayed: ReplayedRoutes, logits: Tensor, weights: Tensor, chosen: Tensor, weigh: Weigh
) -> tuple[Tensor, Tensor]:
    number, replayed.next = replayed.next, replayed.next + 1
    given = replayed.chosen[number].to(chosen)
    different = (given.sort(-1).values != chosen[replayed.rows].sort(-1).values).any(-1)
    replayed.different[number : number + 1] = [different]
    # Rows that agree keep their bits, including the order of their experts.
    rows, given = replayed.rows[different], given[different]
    if not len(rows):
        return weights, chosen
    order = logits[rows].gather(1, given).sort(dim=-1, descending=True, stable=True).indices
    chosen = chosen.index_copy(0, rows, given.gather(1, order))
    return weights.index_copy(0, rows, weigh(chosen)[rows]), chosen
