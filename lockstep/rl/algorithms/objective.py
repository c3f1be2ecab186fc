"""The full loss of a micro-batch: policy, correction, KL divergence, entropy and values, from plain data."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep import ops
from lockstep.config import Algorithm
from lockstep.rl.algorithms.losses import (
    LossFunction,
    PolicyLossInputs,
    clip,
    clip_sequence,
    clip_weight,
    divergences,
    reinforce,
    value_losses,
)
from lockstep.rl.algorithms.off_policy import correction, ratio_metrics, ratios

Metrics = dict[str, Float[Tensor, ""]]


def objective(
    inputs: PolicyLossInputs, algorithm: Algorithm, own: LossFunction | None = None
) -> tuple[Float[Tensor, ""], Metrics]:
    """Σ w · c · loss + kl_coefficient · Σ w · KL − entropy_coefficient · Σ w · entropy, over the tokens, and
    value_coefficient · Σ w · value loss if values are trained.

    The token's loss is `algorithm.loss`, or `own` if that is given, c is the off-policy correction if there is one, and
    KL counts if `algorithm.kl_in` is the loss. Also returns metrics, without gradient: names that end in `_min` and
    `_max` combine over micro-batches by minimum and maximum, all others are weighted sums.

    Everything is a sum over this micro-batch's tokens with weights of the whole step, and terms that span a completion
    depend on that completion alone: losses, gradients and sums of micro-batches of whole completions add up to the
    step's, however it was split.
    """
    loss_of = own or partial(_losses, algorithm=algorithm)
    losses, of_loss = loss_of(inputs)
    weights = inputs.weights
    ratio = ratios(inputs.log_probs, inputs.old_log_probs, inputs.of_completions)
    metrics = ratio_metrics(ratio, weights, "policy/ratio")
    metrics |= {f"policy/{name}": _number(value) for name, value in of_loss.items()}
    if algorithm.off_policy != "none" and inputs.sampler_log_probs is not None:
        between = inputs.old_log_probs, inputs.sampler_log_probs, inputs.of_completions
        bounds = algorithm.off_policy_low, algorithm.off_policy_high
        factor = correction(*between, algorithm.off_policy, algorithm.off_policy_level, *bounds)
        losses = losses * factor
        ratio = ratios(*between, algorithm.off_policy_level)
        metrics |= ratio_metrics(ratio, weights, "off_policy/ratio")
        metrics["off_policy/corrected"] = ops.total((factor != ratio).to(weights.dtype) * weights)
    loss = ops.total(losses * weights)
    if inputs.reference_log_probs is not None:
        divergence = divergences(inputs.log_probs, inputs.reference_log_probs, algorithm.kl_estimator)
        total = ops.total(divergence * weights)
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coefficient * total
        metrics["policy/kl"] = total.detach()
    if inputs.entropies is not None:
        entropy = ops.total(inputs.entropies * weights)
        if algorithm.entropy_coefficient > 0:
            loss = loss - algorithm.entropy_coefficient * entropy
        metrics["policy/entropy"] = entropy.detach()
    if inputs.values is not None and inputs.old_values is not None and inputs.returns is not None:
        errors, bounded = value_losses(inputs.values, inputs.old_values, inputs.returns, algorithm.value_clip)
        total = ops.total(errors * weights)
        loss = loss + algorithm.value_coefficient * total
        metrics["value/loss"] = total.detach()
        metrics["value/clip_fraction"] = inputs.average(bounded)
    return loss, metrics


def _losses(inputs: PolicyLossInputs, algorithm: Algorithm) -> tuple[Float[Tensor, "tokens"], Metrics]:
    """Each token's loss, by the name of the algorithm's, and the share of tokens that it clips."""
    if algorithm.loss == "reinforce":
        losses, clipped = reinforce(inputs)
    else:
        clipping = {"clip": clip, "clip_sequence": clip_sequence, "clip_weight": clip_weight}[algorithm.loss]
        losses, clipped = clipping(inputs, algorithm.clip_low, algorithm.clip_high)
    return losses, {"clip_fraction": inputs.average(clipped)}


def _number(value: Tensor | float) -> Float[Tensor, ""]:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def policy_loss(
    inputs: PolicyLossInputs, clip_low: float, clip_high: float, kl_coefficient: float = 0.0
) -> tuple[Float[Tensor, ""], Metrics]:
    """`objective` for GRPO with these bounds: the clipped loss, and the KL divergence with estimator k3."""
    return objective(inputs, Algorithm(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient))
