"""Per-token losses, each a pure function of its inputs."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lockstep import ops
from lockstep.rl.algorithms.inputs import PolicyLossInputs
from lockstep.rl.algorithms.sequences import mean_of_each

Loss = tuple[Float[Tensor, "tokens"], Bool[Tensor, "tokens"]]
"""For each token: its loss before weighting, and whether it was clipped."""


def clip(inputs: PolicyLossInputs, low: float, high: float) -> Loss:
    """max(−A·r, −A·clip(r, 1 − low, 1 + high)) with the token's ratio r = p / p_old.

    A ratio exactly on a bound is not clipped: its token has the whole gradient, in every version of torch.

    PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3; with separate bounds DAPO, arXiv 2503.14476,
    equation 10.
    """
    return _clipped(inputs, ops.exp(inputs.log_probs - inputs.old_log_probs), low, high)


def clip_sequence(inputs: PolicyLossInputs, low: float, high: float) -> Loss:
    """As `clip`, with one ratio per completion: the geometric mean of its tokens' (GSPO, arXiv 2507.18071).

    In the form of equations 13 and 14: at each token s = sg(ratio) · p / sg(p), whose value is the completion's ratio.
    Summed with equal advantages and weights over a completion, loss and gradient are those of equation 5, and each
    token's gradient depends on that token alone, so the order does not matter.
    """
    own = inputs.log_probs - inputs.log_probs.detach()
    mean = mean_of_each(inputs.log_probs - inputs.old_log_probs, inputs.of_completions)
    return _clipped(inputs, ops.exp(mean) * ops.exp(own), low, high)


def clip_weight(inputs: PolicyLossInputs, low: float, high: float) -> Loss:
    """−sg(clip(r, 1 − low, 1 + high)) · A · log p (CISPO, arXiv 2506.13585, equations 4 and 5).

    A clipped ratio still lets the token's gradient through, at a bounded weight.
    """
    ratio = ops.exp(inputs.log_probs.detach() - inputs.old_log_probs)
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * inputs.advantages * inputs.log_probs, weight != ratio


def reinforce(inputs: PolicyLossInputs) -> Loss:
    """−A · log p (REINFORCE, Williams 1992; RLOO, arXiv 2402.14740, section 2.2); with A = 1, the likelihood loss."""
    none = torch.zeros_like(inputs.advantages, dtype=torch.bool)
    return -inputs.advantages * inputs.log_probs, none


def _clipped(inputs: PolicyLossInputs, ratio: Tensor, low: float, high: float) -> Loss:
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.detach().clamp(1 - low, 1 + high)
    is_clipped = clipped > unclipped
    return torch.where(is_clipped, clipped, unclipped), is_clipped
