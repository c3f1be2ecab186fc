"""How much better a completion is than the others of its group."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

EPSILON = 1e-4


def group_advantages(
    rewards: Float[Tensor, "prompts samples"], normalize: bool = True
) -> Float[Tensor, "prompts samples"]:
    """Rewards less their group's mean, divided by the group's standard deviation where `normalize` is set.

    The deviation is the population's, √(Σ(r − mean)² / n), plus 1e-4. TRL takes the sample's, with n − 1: its
    advantages are √((n − 1) / n) times these, 0.94 in groups of 8.

    With the division: GRPO (arXiv 2402.03300). Without: Dr. GRPO (arXiv 2503.20783), which does not weigh groups of
    nearly equal rewards up. A group of equal rewards gets exactly 0.
    """
    rows = [_advantages(row, normalize) for row in rewards.tolist()]
    return torch.tensor(rows, dtype=rewards.dtype, device=rewards.device).reshape(rewards.shape)


def _advantages(rewards: list[float], normalize: bool) -> list[float]:
    # A group of equal rewards may have a mean that is rounded; its advantages are 0 all the same.
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    # Sums without rounding, so that no library's order of adding counts.
    mean = math.fsum(rewards) / len(rewards)
    centered = [reward - mean for reward in rewards]
    if not normalize:
        return centered
    deviation = math.sqrt(math.fsum(c * c for c in centered) / len(rewards))
    return [c / (deviation + EPSILON) for c in centered]
