"""Estimators of the KL divergence from one sampled token (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from lockstep import ops


def divergences(
    log_probs: Float[Tensor, "tokens"],
    reference_log_probs: Float[Tensor, "tokens"],
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> Float[Tensor, "tokens"]:
    """KL(policy ‖ reference) at each token, which the policy sampled.

    With d = log p_reference − log p: k1 = −d, k2 = d²/2, k3 = e^d − d − 1. k1 and k3 are unbiased as values; k1 can be
    negative. As a loss, the gradient of k2 is that of the divergence, k1's is 0 on average (∇ log p, whatever the
    reference is), and k3's is that of KL(reference ‖ policy).
    """
    distance = reference_log_probs - log_probs
    if estimator == "k1":
        return -distance
    if estimator == "k2":
        return 0.5 * distance * distance
    return ops.exp(distance) - distance - 1
