"""How many tokens each expert of a router gets, and the penalties that even it out.

The penalties are the gradients of two losses, added where the router's own gradient is computed, so that no loss needs
to know of routers. They use the load of the step before, and are divided by its number of tokens, which all ranks know:
so a token's gradient does not depend on the tokens beside it. Every row counts, those that are padding too.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float32, Int
from torch import Tensor

from lockstep.ops import plain

_LOADS: WeakValueDictionary[int, ExpertLoad] = WeakValueDictionary()
_numbers = itertools.count()
_NONE = torch.tensor(-1)


class ExpertLoad:
    """Of one router: the choices of each expert, counted in the backward pass, in which each token comes once."""

    def __init__(self, experts: int, active: int):
        self.active = active
        number = next(_numbers)
        self.key = torch.tensor(number)
        """By which a compiled graph names it: a tensor, for a number would be compiled in, and no layer share it."""
        _LOADS[number] = self
        self.counted = torch.zeros(experts, dtype=torch.int64)
        """Of the tokens of this rank in this step, so far."""
        self.before = torch.zeros(experts, dtype=torch.int64)
        """Of all tokens of the step before; zeros before there is one, and then nothing is penalised."""
        self.auxiliary = 0.0
        """Weight of `experts · Σ share · mean probability`, lowest where the load is even (arXiv 2101.03961)."""
        self.z = 0.0
        """Weight of the mean square of the logits' log-sum-exp, arXiv 2202.08906, which keeps logits small."""

    def __deepcopy__(self, memo: object) -> ExpertLoad:
        return ExpertLoad(len(self.counted), self.active)

    def count(self, chosen: Int[Tensor, "tokens active"]) -> None:
        """Adds the choices of some tokens."""
        self.counted += chosen.flatten().bincount(minlength=len(self.counted)).to(self.counted.device)

    def end_step(self, total: Int[Tensor, "experts"]) -> None:
        """Begins the next step; `total` are the choices of this one on all ranks."""
        self.before.copy_(total)
        self.counted.zero_()

    def penalty(self, logits: Float32[Tensor, "tokens experts"]) -> Float32[Tensor, "tokens experts"] | None:
        """The penalties' gradient by `logits`; None where there is none."""
        tokens = int(self.before.sum()) / self.active
        if not tokens or not (self.auxiliary or self.z):
            return None
        highest = logits.amax(-1, keepdim=True)
        powers = plain.exp(logits - highest)
        total = plain.row_sum(powers)[:, None]
        probabilities = powers / total
        shares = (self.before / tokens).to(torch.float32).to(logits.device)
        # d/dlogit of Σ share · probability: each probability times its share's excess over their mean by probability.
        excess = shares - plain.row_sum(shares * probabilities)[:, None]
        wanted = self.auxiliary * len(shares) * excess + 2 * self.z * (highest + plain.log(total))
        return probabilities * wanted / tokens


def key_of(load: ExpertLoad | None) -> Int[Tensor, ""]:
    """-1 for none."""
    return _NONE if load is None else load.key


def load_of(key: Int[Tensor, ""]) -> ExpertLoad | None:
    """The inverse of `key_of`; None for one that is no more."""
    return _LOADS.get(int(key))
