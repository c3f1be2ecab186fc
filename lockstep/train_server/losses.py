"""The losses of the training API, as its public documentation defines them: sums over one datum's tokens.

Each takes the log-probabilities of the targets, which carry the gradient, the datum's other inputs of the same shape,
and options; it returns one loss per target. The order of operations is that of `rl.algorithms.losses`, so that weights
times advantages, sent as advantages, give the gradient of `lockstep rl`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lockstep import ops
from lockstep.errors import UserError

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]


def cross_entropy(log_probs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """−w · log p; w is 1 without weights."""
    return -log_probs * inputs["weights"] if "weights" in inputs else -log_probs


def importance_sampling(log_probs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """−A · p/q."""
    return -inputs["advantages"] * ops.exp(log_probs - inputs["logprobs"])


def ppo(log_probs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """−min(A·r, A·clip(r)) with r = p/q (arXiv 1707.06347, equation 7)."""
    return _clipped(ops.exp(log_probs - inputs["logprobs"]), inputs["advantages"], options)


def gspo(log_probs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """As `ppo`, each token with the geometric mean of r over the tokens that the mask marks, and with its own gradient
    (GSPO-token, arXiv 2507.18071, equations 13 and 14)."""
    marked = inputs["sequence_ratio_mask"] != 0
    distances = (log_probs.detach() - inputs["logprobs"])[marked]
    mean = ops.total(distances) / max(len(distances), 1)
    return _clipped(ops.exp(mean) * ops.exp(log_probs - log_probs.detach()), inputs["advantages"], options)


def cispo(log_probs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """−sg(clip(r)) · A · log p (arXiv 2506.13585)."""
    ratio = ops.exp(log_probs.detach() - inputs["logprobs"])
    return -_clip(ratio, options) * inputs["advantages"] * log_probs


def dro(log_probs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """−(A · log p − β/2 · (log p/q)²) (arXiv 2405.19107)."""
    distance = log_probs - inputs["logprobs"]
    return -inputs["advantages"] * log_probs + 0.5 * options["beta"] * distance * distance


def _clip(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


def _clipped(ratio: Tensor, advantages: Tensor, options: Options) -> Tensor:
    # A ratio on a bound is not clipped: its token has the whole gradient.
    unclipped, clipped = -advantages * ratio, -advantages * _clip(ratio.detach(), options)
    return clipped.where(clipped > unclipped, unclipped)


@dataclass(frozen=True)
class Loss:
    """A loss, and what it reads."""

    compute: Callable[[Tensor, Inputs, Options], Tensor]
    required: tuple[str, ...] = ()
    """Names of a datum's inputs besides the targets."""
    optional: tuple[str, ...] = ()
    of_graph: tuple[str, ...] = ()
    """Inputs of a client's own loss, of any shape."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Their defaults."""
    gate: str = ""
    """The input whose zeros are targets without loss; empty: none."""
    spans: bool = False
    """Whether a target's loss depends on others of its datum."""
    shares: tuple[str, ...] = ()
    """Inputs that are zero for a prompt: consecutive data with the same prompt compute it once, as samples of a group
    do in `lockstep rl`. Empty: none is shared."""


RATIO = ("logprobs", "advantages")
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": Loss(cross_entropy, optional=("weights",), gate="weights"),
    "importance_sampling": Loss(importance_sampling, RATIO, gate="advantages", shares=RATIO),
    "ppo": Loss(ppo, RATIO, options=CLIP, gate="advantages", shares=RATIO),
    "gspo": Loss(gspo, (*RATIO, "sequence_ratio_mask"), options=CLIP, gate="advantages", spans=True, shares=RATIO),
    "cispo": Loss(
        cispo, RATIO, options={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, gate="advantages", shares=RATIO
    ),
    "dro": Loss(dro, RATIO, options={"beta": 0.05}),
}


def loss_named(name: str) -> Loss:
    """Raises UserError for a loss that this server does not have."""
    if name == "stable_reinforce":
        raise UserError(
            "the loss stable_reinforce has no public formula and is not supported; choose another, such as "
            "importance_sampling"
        )
    if name not in LOSSES:
        raise UserError(f"there is no loss {name[:60]!r}; there are {', '.join((*LOSSES, 'custom'))}")
    return LOSSES[name]


def options_of(name: str, loss: Loss, given: Mapping[str, float]) -> Options:
    """The loss's options. Raises UserError for one that it does not have."""
    if unknown := sorted(given.keys() - loss.options.keys()):
        there = ", ".join(loss.options) or "none"
        raise UserError(f"the loss {name} has no option {unknown[0][:60]!r}; there are: {there}")
    return {**loss.options, **given}
