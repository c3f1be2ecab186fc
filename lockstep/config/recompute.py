"""Activation checkpointing: which activations the backward pass recomputes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import AtLeast

KEEPABLE = ("attention", "linear", "norm", "activation")
"""Operators whose outputs can be saved while the rest of a layer is recomputed."""


@dataclass
class RecomputeConfig:
    """Activation checkpointing: a recomputed layer keeps only its input. Losses and gradients keep their bits."""

    mode: Literal["none", "full", "every", "selective", "budget", "offload"] = "none"
    """What the backward pass recomputes to save memory. `full`: all layers; `every`: every k-th; `selective`: all
    operators except those in `keep`; `budget`: what does not fit `budget_gib`, the quickest first; `offload`: all
    layers, whose inputs wait in host memory."""
    every: Annotated[int, AtLeast(1)] = 2
    """every: k, so that layers 0, k, 2k … are recomputed."""
    keep: tuple[str, ...] = ("attention",)
    """selective: operators whose outputs are kept: attention, linear, norm, activation; compiled: only attention."""
    budget_gib: Annotated[float, AtLeast(0)] = 0.0
    """budget: GiB that a rank's layers can keep from forward to backward, measured in the first step; in a pipeline,
    over all its stages and in-flight micro-batches."""
