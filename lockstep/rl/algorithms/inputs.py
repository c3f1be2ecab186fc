"""What a loss knows of the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass
class PolicyLossInputs:
    """One value per sampled token of a micro-batch, whose completions stand one after the other."""

    log_probs: Float[Tensor, "tokens"]
    """Of the policy being trained; carries the gradient."""
    old_log_probs: Float[Tensor, "tokens"]
    """Of the policy that the importance ratio is taken to: the one before the step."""
    advantages: Float[Tensor, "tokens"]
    weights: Float[Tensor, "tokens"]
    """Share of each token in the step's loss; see `token_weights`."""
    reference_log_probs: Float[Tensor, "tokens"] | None = None
    """Of the model that the KL divergence is measured from."""
    lengths: Sequence[int] | None = None
    """Tokens of each completion, for what is taken over whole ones; None: they are one completion."""
    sampler_log_probs: Float[Tensor, "tokens"] | None = None
    """What the tokens were sampled with, where that is another than the policy before the step: older weights, another
    engine, or a distribution cut by top-k, top-p or min-p."""
    entropies: Float[Tensor, "tokens"] | None = None
    """Of the distribution that each token was drawn from, with gradient, for the entropy bonus."""

    values: Float[Tensor, "tokens"] | None = None
    """V of the state that each token was sampled in, with gradient, where a value function is trained."""
    old_values: Float[Tensor, "tokens"] | None = None
    """The same before the step."""
    returns: Float[Tensor, "tokens"] | None = None
    """What the values are to become."""

    @property
    def of_completions(self) -> list[int]:
        """Tokens of each completion."""
        return [self.log_probs.numel()] if self.lengths is None else list(self.lengths)
