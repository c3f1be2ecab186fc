"""Log-probabilities of chosen tokens: one function for the sampler and the loss.

Logits are reduced in float32, the vocabulary in fixed pieces (`piece_bounds`) joined in a binary tree, so that a
sharded head gives the same bits. Rows go through the head in slices: `[tokens, vocab]` is never materialized.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from lockstep.ops import cuda, native, one_order, plain
from lockstep.ops.adapted_head import adapted_head_gradients
from lockstep.ops.formats import FORMATS
from lockstep.ops.forms import FORMS
from lockstep.ops.head_gradients import (
    SAVED_LOGITS_BYTES,
    ScoredRows,
    added_slice,
    head_gradients,
    hidden_gradient,
    row_slices,
    scored_gradient,
)
from lockstep.ops.head_terms import PLAIN_HEAD, HeadTerms
from lockstep.ops.linear import weight_gradient
from lockstep.ops.sums import total
from lockstep.ops.vocabulary import PIECES, piece_bounds


def token_log_probs(
    hidden: Float[Tensor, "tokens dim"],
    head: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, "tokens"],
    temperature: float = 1.0,
    terms: HeadTerms = PLAIN_HEAD,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """log p(target) under softmax(logits / temperature), and the distribution's entropy in nats.

    The logits are hidden · headᵀ, computed and capped as `terms` say. Both results are float32 and have a gradient,
    which recomputes the logits slice by slice, unless they are few and saved. The entropies' gradient costs nothing if
    they are not used.
    """
    if (form := FORMS.get(type(head))) is not None:
        return form.token_log_probs(hidden, head, targets, temperature, terms)
    inverse = row_factors(temperature, hidden)
    if torch.is_grad_enabled():
        matrices = [matrix for update in terms.updates for matrix in (update.a, update.b)]
        if any(each.requires_grad for each in (hidden, head, *matrices)):
            return _TokenLogProbs.apply(hidden, head, targets, inverse, terms, *matrices)
    log_probs, entropies, _, _ = _forward(hidden, head, targets, inverse, terms)
    return log_probs, entropies


def inverse_temperature(temperature: Float32[Tensor, "rows"]) -> Float32[Tensor, "rows"]:
    """The factor of logits: 1 over each row's temperature, in float32; 1 for temperature 0, which means greedy.

    Trainer and generator both call it, since 1/t rounded from float64 differs for every third temperature.
    """
    return torch.where(temperature == 0, 1.0, 1.0 / temperature)


def row_factors(temperature: float, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens"]:
    """The factor of each row's logits at a common temperature."""
    rows = torch.full((hidden.shape[0],), temperature, dtype=torch.float32, device=hidden.device)
    return inverse_temperature(rows)


def log_prob_sum(
    hidden: Float[Tensor, "tokens dim"],
    head: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, "tokens"],
    weight: float,
    terms: HeadTerms = PLAIN_HEAD,
) -> Float[Tensor, ""]:
    """`weight` · Σ log p(target) at temperature 1: `token_log_probs` summed, at two thirds of the cost.

    The weight is known in the forward pass, so the gradient is computed there from each slice's logits, which are
    computed once instead of twice; not those of a head with updates. With one order, it is the sum over all ranks'
    targets, on each rank.
    """
    if (shared := one_order.shared_targets()) is not None:
        return total(shared.whole(token_log_probs(hidden, head, targets, 1.0, terms)[0])) * weight
    # Decided by the head's type alone, so that tensors without values take the same path as real ones.
    trained = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    if trained and type(head) not in FORMS and not terms.updates:
        return _LogProbSum.apply(hidden, head, targets, weight, terms)
    return total(token_log_probs(hidden, head, targets, 1.0, terms)[0]) * weight


def logits_log_probs(
    logits: Float[Tensor, "rows vocab"],
    targets: Int[Tensor, "rows"],
    inverse_temperature: Float[Tensor, "rows"],
) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows"], Float[Tensor, "rows"]]:
    """Log-probability of the target, entropy, and log of the normalizer of each row, float32, without gradient."""
    bounds = piece_bounds(logits.shape[1], logits.device)
    if native.usable(logits):
        logits = logits.contiguous()
        out, entropies, normalizers = torch.empty(3, logits.shape[0], dtype=torch.float32).unbind()
        results, sizes = (out, entropies, normalizers), (*logits.shape, len(bounds) - 1)
        native.call("log_probs", logits.dtype, logits, targets, inverse_temperature, bounds, *results, *sizes)
        return out, entropies, normalizers
    chosen = logits.gather(1, targets[:, None])[:, 0].float() * inverse_temperature
    return join_masses(masses(logits, inverse_temperature, bounds), chosen)


def masses(
    logits: Float[Tensor, "rows vocab"], inverse_temperature: Float[Tensor, "rows"], bounds: Int[Tensor, "bounds"]
) -> Float32[Tensor, "rows pieces 3"]:
    """For each piece of a row, with x the logits divided by the temperature: m = max x, Σ e^(x - m), Σ e^(x - m) x."""
    if cuda.usable(logits):
        from lockstep.ops.cuda import vocabulary

        return vocabulary.masses(logits, inverse_temperature, bounds)
    if not native.usable(logits):
        return _plain_masses(logits, inverse_temperature, bounds)
    logits = logits.contiguous()
    out = torch.empty(logits.shape[0], len(bounds) - 1, 3, dtype=torch.float32)
    sizes = (*logits.shape, len(bounds) - 1)
    native.call("masses", logits.dtype, logits, inverse_temperature, bounds, out, *sizes)
    return out


def join_masses(
    pieces: Float32[Tensor, "rows pieces 3"], chosen: Float32[Tensor, "rows"]
) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows"], Float[Tensor, "rows"]]:
    """`logits_log_probs` from the masses of the whole vocabulary; `chosen` has the targets' logits / temperature."""
    if cuda.usable(pieces):
        from lockstep.ops.cuda import vocabulary

        return vocabulary.join_masses(pieces, chosen)
    if not native.usable(pieces):
        return _plain_join(pieces, chosen)
    out, entropies, normalizers = torch.empty(3, len(pieces), dtype=torch.float32).unbind()
    results = (out, entropies, normalizers)
    native.call("join_masses", torch.float32, pieces.contiguous(), chosen.contiguous(), *results, *pieces.shape[:2])
    return out, entropies, normalizers


def _plain_masses(logits: Tensor, inverse_temperature: Tensor, bounds: Tensor) -> Tensor:
    scaled = logits.float() * inverse_temperature[:, None]
    result = []
    for first, stop in pairwise(bounds.tolist()):
        piece = scaled[:, first:stop]
        highest = piece.amax(-1)
        weights = plain.exp(piece - _finite(highest)[:, None])
        moment = plain.row_sum(weights * piece.masked_fill(weights == 0, 0.0))
        result.append(torch.stack((highest, plain.row_sum(weights), moment), -1))
    return torch.stack(result, 1) if result else scaled.new_empty(len(scaled), 0, 3)


def _plain_join(pieces: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    nothing = pieces.new_tensor([-math.inf, 0.0, 0.0]).expand(len(pieces), PIECES - pieces.shape[1], 3)
    highest, mass, moment = torch.cat([pieces, nothing], 1).unbind(-1)
    while highest.shape[1] > 1:
        joint = torch.maximum(highest[:, ::2], highest[:, 1::2])
        left, right = (plain.exp(highest[:, side::2] - _finite(joint)) for side in (0, 1))
        mass = mass[:, ::2] * left + mass[:, 1::2] * right
        moment = moment[:, ::2] * left + moment[:, 1::2] * right
        highest = joint
    normalizers = highest[:, 0] + plain.log(mass[:, 0])
    return chosen - normalizers, normalizers - moment[:, 0] / mass[:, 0], normalizers


def _finite(highest: Tensor) -> Tensor:
    """0 for the maximum of a piece without tokens, so that -inf minus it stays -inf."""
    return torch.where(highest.isinf(), 0.0, highest)


def _forward(
    hidden: Tensor, head: Tensor, targets: Tensor, inverse: Tensor, terms: HeadTerms
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probabilities, entropies, normalizers, and the logits if they are few."""
    slices = row_slices(len(hidden), head.shape[0], head)
    parts, saved = [], None
    for rows in slices:
        logits = terms.of(rows).logits(hidden[rows], head)
        parts.append(logits_log_probs(logits, targets[rows], inverse[rows]))
        saved = logits if len(slices) == 1 and logits.nbytes <= SAVED_LOGITS_BYTES else None
        del logits  # before the next ones are allocated
    if not parts:
        empty = torch.empty(3, 0, dtype=torch.float32, device=hidden.device)
        return empty[0], empty[1], empty[2], None
    log_probs, entropies, normalizers = (torch.cat(column) for column in zip(*parts))
    return log_probs, entropies, normalizers, saved


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        inverse: Tensor,
        terms: HeadTerms,
        *matrices: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """matrices: A and B of each of the terms' updates, which autograd knows only as arguments."""
        log_probs, entropies, normalizers, ctx.logits = _forward(hidden, head, targets, inverse, terms)
        ctx.terms = terms
        ctx.save_for_backward(hidden, head, targets, inverse, normalizers, entropies, *matrices)
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, targets, inverse, normalizers, entropies, *_ = ctx.saved_tensors
        # They are overwritten, so another backward pass recomputes them.
        logits, ctx.logits = ctx.logits, None
        vocab, rows = head.shape[0], ScoredRows(targets, inverse, normalizers, entropies, *grads)
        bounds, needed = piece_bounds(vocab), ctx.needs_input_grad[1]
        if ctx.terms.updates:
            found = adapted_head_gradients(hidden, head, rows, ctx.terms, logits, needed)
            return *found[:2], None, None, None, *found[2:]
        gradients = head_gradients(hidden, head, rows, vocab, bounds, logits=logits, terms=ctx.terms, trained=needed)
        return *gradients, None, None, None


class _LogProbSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weight: float, terms: HeadTerms) -> Tensor:
        format = FORMATS[terms.format]
        rounded_head = format.rounded_weight(head)
        grad_hidden = torch.empty_like(hidden)
        grad_head: Tensor | None = None
        ones = torch.ones(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        parts, bounds = [], piece_bounds(head.shape[0])
        for rows in (slices := row_slices(len(hidden), head.shape[0], head)):
            logits = terms.logits(hidden[rows], head)
            log_probs, entropies, normalizers = logits_log_probs(logits, targets[rows], ones[rows])
            parts.append(log_probs)
            scored = ScoredRows(targets[rows], ones[rows], normalizers, entropies, ones[rows] * weight, None)
            grad = scored_gradient(logits, scored, terms.softcap)
            grad_hidden[rows] = hidden_gradient(grad, rounded_head, bounds)
            if head.requires_grad:
                # Not named: the last slice's is not held while the gradient is rounded.
                grad_head = added_slice(
                    grad_head, weight_gradient(grad, format.rounded_rows(hidden[rows])), len(slices)
                )
        if head.requires_grad:
            grad_head = torch.zeros_like(head) if grad_head is None else grad_head.to(head.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        return total(torch.cat(parts)) * weight if parts else ones.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grads[0], None if grad_head is None else grad_head * grads[0], None, None, None
