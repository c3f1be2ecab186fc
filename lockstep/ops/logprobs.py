"""Log-probabilities of chosen tokens: one function for the sampler and the loss.

Logits are reduced in float32, the vocabulary in `PIECES` fixed pieces joined in a binary tree, so that a sharded
head gives the same bits. Rows go through the head in slices: `[tokens, vocab]` never exists whole.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import cuda, native, plain
from lockstep.ops.forms import FORMS
from lockstep.ops.linear import linear, linear_gradients
from lockstep.ops.sums import total
from lockstep.ops.temperature import inverse_temperature

PIECES = 8
SLICE_BYTES = 1 << 27
"""Logits that are held at once. Smaller slices read the head's weight, and write its gradient, more often."""


def token_log_probs(
    hidden: Float[Tensor, "tokens dim"],
    head: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, "tokens"],
    temperature: float = 1.0,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """log p(target) under softmax(hidden · headᵀ / temperature), and the distribution's entropy in nats.

    Both float32; the log-probabilities carry a gradient, the entropies none. The gradient recomputes the logits
    slice by slice.
    """
    if (form := FORMS.get(type(head))) is not None:
        return form.token_log_probs(hidden, head, targets, temperature)
    inverse = row_factors(temperature, hidden)
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        return _TokenLogProbs.apply(hidden, head, targets, inverse)
    return _forward(hidden, head, targets, inverse)[:2]


def row_factors(temperature: float, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens"]:
    """What each row's logits are multiplied by at a common temperature."""
    rows = torch.full((hidden.shape[0],), temperature, dtype=torch.float32, device=hidden.device)
    return inverse_temperature(rows)


def log_prob_sum(
    hidden: Float[Tensor, "tokens dim"], head: Float[Tensor, "vocab dim"], targets: Int[Tensor, "tokens"], weight: float
) -> Float[Tensor, ""]:
    """`weight` · Σ log p(target) at temperature 1: `token_log_probs` summed, at two thirds of the cost.

    The weight is known on the way forward, so the gradient is made there, while a slice's logits are at hand, and
    they are computed once instead of twice.
    """
    plain = type(hidden) is Tensor and type(head) in (Tensor, torch.nn.Parameter)
    if plain and torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        return _LogProbSum.apply(hidden, head, targets, weight)
    return total(token_log_probs(hidden, head, targets)[0]) * weight


def logits_log_probs(
    logits: Float[Tensor, "rows vocab"],
    targets: Int[Tensor, "rows"],
    inverse_temperature: Float[Tensor, "rows"],
) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows"], Float[Tensor, "rows"]]:
    """Log-probability of the target, entropy, and log of the normaliser of each row, float32, without gradient."""
    if cuda.usable(logits):
        from lockstep.ops.cuda import vocabulary

        return vocabulary.log_probs(logits, targets, inverse_temperature)
    if not native.usable(logits):
        return _reference(logits, targets, inverse_temperature)
    logits = logits.contiguous()
    out, entropies, normalizers = torch.empty(3, logits.shape[0], dtype=torch.float32).unbind()
    native.call(
        "log_probs",
        logits.dtype,
        logits,
        targets,
        inverse_temperature,
        out,
        entropies,
        normalizers,
        *logits.shape,
    )
    return out, entropies, normalizers


def _reference(logits: Tensor, targets: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scaled = logits.float() * inverse_temperature[:, None]
    pieces = torch.nn.functional.pad(scaled, (0, -scaled.shape[1] % PIECES), value=float("-inf"))
    pieces = pieces.unflatten(1, (PIECES, -1))
    highest = pieces.amax(-1)
    weights = plain.exp(pieces - _finite(highest)[..., None])
    mass = plain.row_sum(weights)
    moment = plain.row_sum(weights * pieces.masked_fill(weights == 0, 0.0))
    while highest.shape[1] > 1:
        joint = torch.maximum(highest[:, ::2], highest[:, 1::2])
        left, right = (plain.exp(highest[:, side::2] - _finite(joint)) for side in (0, 1))
        mass = mass[:, ::2] * left + mass[:, 1::2] * right
        moment = moment[:, ::2] * left + moment[:, 1::2] * right
        highest = joint
    normalizers = highest[:, 0] + plain.log(mass[:, 0])
    chosen = scaled.gather(1, targets[:, None])[:, 0]
    return chosen - normalizers, normalizers - moment[:, 0] / mass[:, 0], normalizers


def _finite(highest: Tensor) -> Tensor:
    """0 for the maximum of a piece without tokens, so that -inf minus it stays -inf."""
    return torch.where(highest.isinf(), 0.0, highest)


def row_slices(tokens: int, head: Tensor) -> list[slice]:
    """Rows whose logits are held at once."""
    row_bytes = head.shape[0] * head.element_size()
    rows = max(1, SLICE_BYTES // row_bytes)
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def _forward(hidden: Tensor, head: Tensor, targets: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = [
        logits_log_probs(linear(hidden[rows], head), targets[rows], inverse[rows])
        for rows in row_slices(hidden.shape[0], head)
    ]
    if not parts:
        empty = torch.empty(3, 0, dtype=torch.float32, device=hidden.device)
        return empty[0], empty[1], empty[2]
    log_probs, entropies, normalizers = (torch.cat(column) for column in zip(*parts))
    return log_probs, entropies, normalizers


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropies, normalizers = _forward(hidden, head, targets, inverse)
        ctx.save_for_backward(hidden, head, targets, inverse, normalizers)
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, head, targets, inverse, normalizers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head: Tensor | None = None
        for rows in row_slices(hidden.shape[0], head):
            logits = linear(hidden[rows], head)
            grad = logits_gradient(logits, targets[rows], inverse[rows], normalizers[rows], grads[0][rows])
            grad_hidden[rows], part = linear_gradients(grad, hidden[rows], head)
            # Slices add up in float32; one slice alone needs no wider copy.
            grad_head = part if grad_head is None else grad_head.float().add_(part)
        if grad_head is None:  # a micro-batch of padding alone, whose backward still takes part in the ranks' exchange
            grad_head = torch.zeros_like(head)
        return grad_hidden, grad_head.to(head.dtype), None, None


class _LogProbSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weight: float) -> Tensor:
        grad_hidden = torch.empty_like(hidden)
        grad_head: Tensor | None = None
        ones = torch.ones(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        parts = []
        for rows in row_slices(hidden.shape[0], head):
            logits = linear(hidden[rows], head)
            log_probs, _, normalizers = logits_log_probs(logits, targets[rows], ones[rows])
            parts.append(log_probs)
            grad = logits_gradient(logits, targets[rows], ones[rows], normalizers, ones[rows] * weight)
            grad_hidden[rows], part = linear_gradients(grad, hidden[rows], head)
            grad_head = part if grad_head is None else grad_head.float().add_(part)
        grad_head = torch.zeros_like(head) if grad_head is None else grad_head.to(head.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        return total(torch.cat(parts)) * weight if parts else ones.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grads[0], grad_head * grads[0], None, None


def logits_gradient(logits: Tensor, targets: Tensor, inverse: Tensor, normalizers: Tensor, grad: Tensor) -> Tensor:
    """d log p(target) / d logits = (onehot - p) / temperature, times the incoming gradient; overwrites `logits`.

    A negative target is not among these logits: they are a part of the vocabulary, and another part holds it.
    """
    if cuda.usable(logits):
        from lockstep.ops.cuda import vocabulary

        return vocabulary.logits_gradient(logits, targets, inverse, normalizers, grad)
    if native.usable(logits):
        native.call(
            "log_probs_backward",
            logits.dtype,
            logits,
            targets,
            inverse,
            normalizers,
            grad.contiguous(),
            *logits.shape,
        )
        return logits
    factor = (grad * inverse)[:, None]
    gradient = torch.exp(logits.float() * inverse[:, None] - normalizers[:, None]) * -factor
    chosen = torch.where(targets[:, None] < 0, 0.0, factor)
    return gradient.scatter_add(1, targets[:, None].clamp(min=0), chosen).to(logits.dtype)
