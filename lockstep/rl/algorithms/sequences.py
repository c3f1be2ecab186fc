"""Sums over concatenated completions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep import ops


def sum_of_each(values: Float[Tensor, "tokens"], lengths: Sequence[int]) -> Float[Tensor, "tokens"]:
    """At each token, the sum of `values` over its completion, without gradient.

    Each completion is summed separately, so its bits do not depend on its neighbors.
    """
    parts = values.detach().split(list(lengths))
    return torch.cat([ops.total(part).expand_as(part) for part in parts]) if parts else values.detach()


def mean_of_each(values: Float[Tensor, "tokens"], lengths: Sequence[int]) -> Float[Tensor, "tokens"]:
    """At each token, the mean of `values` over its completion, without gradient."""
    counts = torch.cat([torch.full((n,), float(n), dtype=values.dtype) for n in lengths] or [values.new_empty(0).cpu()])
    return sum_of_each(values, lengths) / counts.to(values.device)
