"""Corrections for tokens sampled from another distribution: older weights, an engine with different numerics, or
cuts by top-k, top-p or min-p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep import ops
from lockstep.rl.algorithms.losses import sum_of_each

FACTORS = (1.01, 1.1, 2.0)
"""How far from 1 a ratio may be, up or down, to count in `within_…`."""


def correction(
    old_log_probs: Float[Tensor, "tokens"],
    sampler_log_probs: Float[Tensor, "tokens"],
    lengths: Sequence[int],
    how: Literal["truncate", "mask"],
    level: Literal["token", "sequence"],
    low: float,
    high: float,
) -> Float[Tensor, "tokens"]:
    """The factor of each token's loss, without gradient.

    The ratio is ρ = p_old / p_sampler of the token or, with `sequence`, the product over its completion. `truncate`:
    min(ρ, `high`) (truncated importance sampling, Ionides 2008; IMPALA, arXiv 1802.01561, section 4.1). `mask`: ρ if
    `low` ≤ ρ ≤ `high`, else 0.
    """
    ratio = ratios(old_log_probs, sampler_log_probs, lengths, level)
    if how == "truncate":
        return ratio.clamp(max=high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def ratios(
    log_probs: Float[Tensor, "tokens"],
    sampler_log_probs: Float[Tensor, "tokens"],
    lengths: Sequence[int],
    level: Literal["token", "sequence"] = "token",
) -> Float[Tensor, "tokens"]:
    """p / p_sampler of each token or, with `sequence`, the product over each token's completion; no gradient."""
    difference = log_probs.detach() - sampler_log_probs
    return ops.exp(sum_of_each(difference, lengths) if level == "sequence" else difference)


def ratio_metrics(
    ratio: Float[Tensor, "tokens"], weights: Float[Tensor, "tokens"], prefix: str
) -> dict[str, Float[Tensor, ""]]:
    """The spread of the ratios: `…_min` and `…_max`, and as weighted sums, which add up over micro-batches, `…_mean`,
    the mean square `…_square`, and the fractions `…_within_F` of tokens whose ratio is within a factor F of 1.

    The effective fraction of the samples is mean² / square (Kong 1992): 1 if all ratios are equal.
    """
    ratio = ratio.detach()
    one = torch.ones((), dtype=ratio.dtype, device=ratio.device)
    distance = torch.maximum(ratio, 1 / ratio)
    return {
        f"{prefix}_min": ratio.min() if ratio.numel() else one,
        f"{prefix}_max": ratio.max() if ratio.numel() else one,
        f"{prefix}_mean": ops.total(ratio * weights),
        f"{prefix}_square": ops.total(ratio * ratio * weights),
        **{f"{prefix}_within_{f:g}": ops.total((distance <= f).to(ratio.dtype) * weights) for f in FACTORS},
    }
