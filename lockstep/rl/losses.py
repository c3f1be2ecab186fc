"""The policy loss: a pure function from what a token knows to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep import ops


@dataclass
class PolicyLossInputs:
    """One value a sampled token."""

    log_probs: Float[Tensor, "tokens"]
    """Of the policy being trained; carries the gradient."""
    old_log_probs: Float[Tensor, "tokens"]
    """Of the policy that sampled the token."""
    advantages: Float[Tensor, "tokens"]
    weights: Float[Tensor, "tokens"]
    """Share of each token in the step's loss; see `token_weights`."""
    reference_log_probs: Float[Tensor, "tokens"] | None = None
    """Of the model that the KL divergence is measured from."""


def policy_loss(
    inputs: PolicyLossInputs, clip_low: float, clip_high: float, kl_coefficient: float = 0.0
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Σ w · max(−A·r, −A·clip(r, 1 − clip_low, 1 + clip_high)) + kl_coefficient · Σ w · KL.

    r is the importance ratio; separate bounds as in DAPO (arXiv 2503.14476). KL is the estimator
    e^d − d − 1 with d = log p_reference − log p (Schulman 2020, k3). Returns the loss and, without gradient,
    `policy/ratio_max` and the weighted sums `policy/clip_fraction` and `policy/kl`.

    Everything is a sum over this micro-batch with weights of the whole step, so the losses, gradients and weighted sums
    of micro-batches add up to the step's; `policy/ratio_max` combines by maximum.
    """
    ratio = ops.exp(inputs.log_probs - inputs.old_log_probs)
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = ops.total(torch.maximum(unclipped, clipped) * inputs.weights)
    metrics = {
        "policy/ratio_max": ratio.detach().max() if ratio.numel() else torch.tensor(1.0),
        "policy/clip_fraction": ops.total((clipped > unclipped).float() * inputs.weights),
    }
    if inputs.reference_log_probs is not None:
        distance = inputs.reference_log_probs - inputs.log_probs
        divergence = ops.total((ops.exp(distance) - distance - 1) * inputs.weights)
        loss = loss + kl_coefficient * divergence
        metrics["policy/kl"] = divergence.detach()
    return loss, metrics


def token_weights(lengths: Sequence[int], average: Literal["token", "sequence"]) -> list[Tensor]:
    """Each completion's token weights, which add up to 1 over all completions of a step.

    `token`: every token weighs the same. `sequence`: every completion does, whatever its length; an empty one counts
    for nothing.
    """
    if average == "token":
        total = sum(lengths)
        return [torch.full((n,), 1.0 / max(total, 1)) for n in lengths]
    sequences = sum(n > 0 for n in lengths)
    return [torch.full((n,), 1.0 / max(n * sequences, 1)) for n in lengths]
