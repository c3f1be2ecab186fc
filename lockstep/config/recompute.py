"""Which activations the backward pass computes again instead of keeping them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import AtLeast

KEEPABLE = ("attention", "linear", "norm", "activation")
"""Operators whose outputs can be kept while the rest of a layer is recomputed."""


@dataclass
class RecomputeConfig:
    """Memory for time: a recomputed layer keeps its input only. Losses and gradients keep their bits."""

    mode: Literal["none", "full", "every", "selective", "budget"] = "none"
    """`full`: all layers; `every`: every k-th; `selective`: all but operators in `keep`; `budget`: as it needs."""
    every: Annotated[int, AtLeast(1)] = 2
    """every: layers 0, k, 2k … are recomputed."""
    keep: tuple[str, ...] = ("attention",)
    """selective: operators whose outputs are kept: attention, linear, norm, activation; compiled: attention only."""
    budget_gib: Annotated[float, AtLeast(0)] = 0.0
    """budget: GiB that a rank's layers may keep from forward to backward, measured in the first step; in a pipeline of
    all its stages and micro-batches under way."""
