"""Preference losses, as functions of whole answers' log-probabilities under the policy and a reference.

Written π for a policy's probability of an answer y to a prompt x, w for the chosen and l for the rejected answer, and
r(y) = log π(y|x) - log π_ref(y|x).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lockstep import ops


@dataclass
class AnswerLogProbs:
    """One answer for each example of a batch; log-probabilities are sums over an answer's tokens, float32, in nats."""

    log_probs: Float[Tensor, "examples"]
    reference_log_probs: Float[Tensor, "examples"]
    """Without gradient."""
    lengths: Int[Tensor, "examples"]
    """Tokens that are scored."""

    @property
    def log_ratios(self) -> Float[Tensor, "examples"]:
        """r(y) = log π(y|x) - log π_ref(y|x)."""
        return self.log_probs - self.reference_log_probs


def dpo_loss(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, beta: float, label_smoothing: float = 0.0
) -> Float[Tensor, "examples"]:
    """-log σ(β (r(w) - r(l))), arXiv 2305.18290, equation 7.

    label_smoothing: the share of pairs assumed to be labeled the wrong way round (conservative DPO).
    """
    return _logistic(beta * (chosen.log_ratios - rejected.log_ratios), label_smoothing)


def ipo_loss(chosen: AnswerLogProbs, rejected: AnswerLogProbs, beta: float) -> Float[Tensor, "examples"]:
    """(r(w) / |w| - r(l) / |l| - 1 / (2 β))², arXiv 2310.12036, equation 17, where β is written τ.

    Ratios are means over an answer's tokens, as in TRL, so that one β fits answers of any length.
    """
    difference = chosen.log_ratios / chosen.lengths - rejected.log_ratios / rejected.lengths
    return (difference - 1 / (2 * beta)).square()


def simpo_loss(
    chosen: AnswerLogProbs, rejected: AnswerLogProbs, beta: float, margin: float, label_smoothing: float = 0.0
) -> Float[Tensor, "examples"]:
    """-log σ(β / |w| log π(w|x) - β / |l| log π(l|x) - γ), arXiv 2405.14734, equation 6; without a reference.

    margin: γ.
    """
    difference = chosen.log_probs / chosen.lengths - rejected.log_probs / rejected.lengths
    return _logistic(beta * difference - margin, label_smoothing)


def kto_loss(
    answers: AnswerLogProbs,
    desirable: Bool[Tensor, "examples"],
    divergence: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, "examples"]:
    """λ (1 - σ(± β (r(y) - z))), arXiv 2402.01306, equation 8: + for a desirable answer, - for one that is not.

    divergence: z, the divergence of the policy from the reference, at least 0; see `kto_divergence`.
    """
    reward = beta * (answers.log_ratios - divergence)
    good, bad = 1 - ops.sigmoid(reward), 1 - ops.sigmoid(-reward)
    return desirable_weight * good * desirable + undesirable_weight * bad * ~desirable


def kto_divergence(log_ratio_sum: float, count: int) -> float:
    """max(0, mean r(y')), y' being answers to other prompts than x: z of `kto_loss`, arXiv 2402.01306, section 4.1."""
    return max(0.0, log_ratio_sum / max(count, 1))


def bradley_terry_loss(
    chosen: Float[Tensor, "examples"], rejected: Float[Tensor, "examples"]
) -> Float[Tensor, "examples"]:
    """-log σ(s(w) - s(l)) of two answers' scores: a reward model's loss (Bradley and Terry, 1952)."""
    return _logistic(chosen - rejected, 0.0)


def _logistic(logits: Float[Tensor, "examples"], label_smoothing: float) -> Float[Tensor, "examples"]:
    loss = -ops.log_sigmoid(logits)
    if not label_smoothing:
        return loss
    return loss * (1 - label_smoothing) - ops.log_sigmoid(-logits) * label_smoothing
