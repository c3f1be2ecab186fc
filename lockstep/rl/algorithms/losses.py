"""Per-token losses, each a pure function of its inputs; and what the tokens weigh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from lockstep import ops

Loss = tuple[Float[Tensor, "tokens"], Bool[Tensor, "tokens"]]
"""For each token: its loss before weighting, and whether it was clipped."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss is a function of: one float32 per sampled token of a micro-batch, whose completions are
    concatenated."""

    log_probs: Float[Tensor, "tokens"]
    """Of the policy being trained; carries the gradient."""
    old_log_probs: Float[Tensor, "tokens"]
    """Of the policy in the denominator of the importance ratio: the one before the step."""
    advantages: Float[Tensor, "tokens"]
    """The same for all tokens of a completion, unless the run's advantages are per token."""
    weights: Float[Tensor, "tokens"]
    """Share of each token in the step's loss; see `token_weights`."""
    reference_log_probs: Float[Tensor, "tokens"] | None = None
    """Of the reference model for the KL divergence."""
    lengths: Sequence[int] | None = None
    """Tokens per completion, for terms that span whole completions; None: they are one completion."""
    sampler_log_probs: Float[Tensor, "tokens"] | None = None
    """Of the distribution that the tokens were sampled from, if it is not the policy before the step: older weights,
    another engine, or a distribution cut by top-k, top-p or min-p."""
    entropies: Float[Tensor, "tokens"] | None = None
    """Of the distribution that each token was drawn from, with gradient, for the entropy bonus."""

    values: Float[Tensor, "tokens"] | None = None
    """V of the state in which each token was sampled, with gradient, if a value function is trained."""
    old_values: Float[Tensor, "tokens"] | None = None
    """The same before the step."""
    returns: Float[Tensor, "tokens"] | None = None
    """The targets of the values."""

    @property
    def of_completions(self) -> list[int]:
        """Tokens of each completion."""
        return [self.log_probs.numel()] if self.lengths is None else list(self.lengths)

    def completion_means(self, values: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
        """At each token, the mean of `values` over its completion, without gradient."""
        return mean_of_each(values, self.of_completions)

    def average(self, values: Shaped[Tensor, "tokens"]) -> Float[Tensor, ""]:
        """This micro-batch's share of the step's mean of `values`, weighted as the loss is: a metric of a loss."""
        return ops.total(values.detach().to(self.weights.dtype) * self.weights)


LossFunction = Callable[[PolicyLossInputs], tuple[Tensor, Mapping[str, Tensor | float]]]
"""A loss of the user's own: for each token its loss before weighting, and metrics by name, each one number. Metrics add
up over a step's micro-batches, as `PolicyLossInputs.average` makes them; of names that end in `_min` and `_max` the
least and the largest count."""


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
    mean = inputs.completion_means(inputs.log_probs - inputs.old_log_probs)
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


def value_losses(
    values: Float[Tensor, "tokens"],
    old_values: Float[Tensor, "tokens"],
    returns: Float[Tensor, "tokens"],
    clip: float,
) -> Loss:
    """½ max((V − R)², (V_clipped − R)²) with V_clipped = V_old + min(max(V − V_old, −clip), clip); ½ (V − R)² for 0.

    The value loss of PPO (arXiv 1707.06347, equation 9) with the clipping of its authors' implementation: as for the
    policy, there is no gradient where a value has already moved further than `clip` from the one before the step and is
    closer to R than the bound. Exactly on the bound, or exactly as far from R, it has the whole gradient.
    """
    plain = (values - returns).square()
    if clip == 0:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    moved = (values - old_values).detach()
    clipped = (old_values + moved.clamp(-clip, clip) - returns).square()
    is_clipped = (moved.abs() > clip) & (clipped > plain)
    return 0.5 * torch.where(is_clipped, clipped, plain), is_clipped


def token_weights(
    lengths: Sequence[int],
    average: Literal["token", "sequence", "budget"],
    budget: int = 0,
    masked: Sequence[bool] = (),
) -> list[Tensor]:
    """Each completion's token weights; over all completions of a step they add up to 1, except with `budget`.

    masked: for each completion whether its tokens weigh 0; empty: none. They do not count among the tokens that `token`
    averages over, but among the completions, as in TRL.

    `token`: every token weighs the same (DAPO, arXiv 2503.14476, equation 12). `sequence`: every completion does,
    whatever its length (GRPO, arXiv 2402.03300, equation 3); empty ones do not count. `budget`: every token weighs
    1 / (completions · `budget`), so a token's weight depends neither on its completion's length nor on the others'
    (Dr. GRPO, arXiv 2503.20783, section 3.2).
    """
    masked = masked or [False] * len(lengths)
    sequences = sum(n > 0 for n in lengths)
    total = sum(n for n, is_masked in zip(lengths, masked) if not is_masked)

    def weight(length: int) -> float:
        if average == "token":
            return 1.0 / max(total, 1)
        return 1.0 / max(sequences * (budget if average == "budget" else length), 1)

    return [torch.full((n,), 0.0 if is_masked else weight(n)) for n, is_masked in zip(lengths, masked)]


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
