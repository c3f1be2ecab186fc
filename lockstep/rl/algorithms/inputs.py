"""What a loss gets for the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass
class PolicyLossInputs:
    """One value per sampled token of a micro-batch, whose completions are concatenated."""

    log_probs: Float[Tensor, "tokens"]
    """Of the policy being trained; carries the gradient."""
    old_log_probs: Float[Tensor, "tokens"]
    """Of the policy in the denominator of the importance ratio: the one before the step."""
    advantages: Float[Tensor, "tokens"]
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
