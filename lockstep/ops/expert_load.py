"""How many tokens each expert of a router gets, and the penalties that balance the load.

The penalties are the gradients of two auxiliary losses, added to the router's gradient, so that loss functions do not
depend on routers. They are means over the step's tokens, whose number all ranks know before its first forward, and use
the load of the previous step, so that a token's gradient does not depend on the other tokens. `counted_rows` sets how
often each row counts: padding does not, and a row shared by several sequences counts once for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int
from torch import Tensor

from lockstep.ops import plain

_LOADS: WeakValueDictionary[int, ExpertLoad] = WeakValueDictionary()
_numbers = itertools.count()
_NONE = torch.tensor(-1)
_counts: ContextVar[Tensor | None] = ContextVar("row_counts", default=None)


@contextmanager
def counted_rows(counts: Int[Tensor, "tokens"] | None) -> Iterator[None]:
    """In this context, how often each row of a forward pass counts in its experts' load; None: once.

    Ranks that share the rows pass the counts of all rows.
    """
    token = _counts.set(counts)
    try:
        yield
    finally:
        _counts.reset(token)


class ExpertLoad:
    """One router's load: the choices of each expert, counted in the backward pass, where each token occurs once."""

    def __init__(self, experts: int, active: int):
        self.active = active
        number = next(_numbers)
        self.key = torch.tensor(number)
        """Identifies it in a compiled graph: a tensor, since a number would be a constant of the graph."""
        _LOADS[number] = self
        self.counted = torch.zeros(experts, dtype=torch.int64)
        """Choices per expert of this rank's tokens so far in this step."""
        self.before = torch.zeros(experts, dtype=torch.int64)
        """Choices per expert of all tokens of the previous step; zeros in the first step, which has no load penalty."""
        self.auxiliary = 0.0
        """Weight of `experts · Σ share · mean probability`, lowest if the load is even (arXiv 2101.03961)."""
        self.z = 0.0
        """Weight of the mean square of the logits' log-sum-exp (arXiv 2202.08906), which keeps logits small."""
        self.tokens = 0
        """Tokens of this step on all ranks, the divisor of the means; 0: no penalties."""
        self.part = (0, 1)
        """(index, count): this rank's router gets part `index` of `count` equal parts of a forward pass's rows."""

    def __deepcopy__(self, memo: object) -> ExpertLoad:
        return ExpertLoad(len(self.counted), self.active)

    def counts_of(self, rows: int) -> Int[Tensor, "rows"] | None:
        """How often each of this rank's rows counts (`counted_rows`); None: once."""
        counts = _counts.get()
        if counts is None:
            return None
        rank, ranks = self.part
        local = counts.unflatten(0, (ranks, -1))[rank]
        # A single row is compiled with a second one, which does not count.
        return F.pad(local, (0, rows - len(local)))

    def count(self, chosen: Int[Tensor, "tokens active"], counts: Int[Tensor, "tokens"] | None) -> None:
        """Adds the choices of some tokens, each `counts` times."""
        each = torch.ones_like(chosen) if counts is None else counts[:, None].expand_as(chosen)
        load = torch.zeros(len(self.counted), dtype=torch.int64, device=chosen.device)
        # On the device of the choices, without synchronizing: a step reads its load once, at its end.
        self.counted = self.counted.to(chosen.device) + load.index_add_(0, chosen.flatten(), each.flatten())

    def end_step(self, total: Int[Tensor, "experts"]) -> None:
        """Starts the next step. total: this step's choices per expert on all ranks."""
        self.before.copy_(total)
        self.counted.zero_()

    def penalty(
        self, logits: Float32[Tensor, "tokens experts"], counts: Int[Tensor, "tokens"] | None = None
    ) -> Float32[Tensor, "tokens experts"] | None:
        """The penalties' gradient with respect to `logits`, whose rows count `counts` times; None without penalties."""
        if not self.tokens or not (self.auxiliary or self.z):
            return None
        highest = logits.amax(-1, keepdim=True)
        powers = plain.exp(logits - highest)
        total = plain.row_sum(powers)[:, None]
        probabilities = powers / total
        tokens_before = max(int(self.before.sum()) / self.active, 1.0)
        shares = (self.before / tokens_before).to(torch.float32).to(logits.device)
        # d/dlogit of Σ share · probability: each probability times its share's excess over their mean by probability.
        excess = shares - plain.row_sum(shares * probabilities)[:, None]
        wanted = self.auxiliary * len(shares) * excess + 2 * self.z * (highest + plain.log(total))
        gradient = probabilities * wanted / self.tokens
        return gradient if counts is None else gradient * counts[:, None]


def key_of(load: ExpertLoad | None) -> Int[Tensor, ""]:
    """The load's key in a compiled graph; -1 for None."""
    return _NONE if load is None else load.key


def load_of(key: Int[Tensor, ""]) -> ExpertLoad | None:
    """The inverse of `key_of`; None for a load that no longer exists."""
    return _LOADS.get(int(key))
