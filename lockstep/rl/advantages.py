"""How much better a completion is than the others of its group."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

EPSILON = 1e-4


def group_advantages(
    rewards: Float[Tensor, "prompts samples"], normalize: bool = True
) -> Float[Tensor, "prompts samples"]:
    """Rewards less their group's mean, divided by the group's standard deviation where `normalize` is set.

    With the division: GRPO (arXiv 2402.03300). Without: Dr. GRPO (arXiv 2503.20783), which does not weigh groups of
    nearly equal rewards up. A group of equal rewards gets exactly 0.
    """
    # A group of equal rewards may have a mean that is rounded; its advantages are 0 all the same.
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)
    centered = (rewards - rewards.mean(1, keepdim=True)).masked_fill(equal, 0.0)
    if not normalize:
        return centered
    return centered / (rewards.std(1, keepdim=True, correction=0) + EPSILON)
