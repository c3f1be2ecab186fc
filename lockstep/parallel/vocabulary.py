"""Log-probabilities where each rank holds a part of the head's vocabulary (loss parallel).

No rank ever has another's logits: of each row the ranks exchange the log of their normaliser, the mean of their
logits and the chosen one, three numbers. The gradient then needs the whole vocabulary's normaliser alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from lockstep import ops
from lockstep.ops.linear import linear_gradients
from lockstep.ops.logprobs import logits_gradient, row_factors, row_slices


def sharded_token_log_probs(
    hidden: Float[Tensor, "tokens dim"],
    head: Float[Tensor, "part dim"],
    targets: Int[Tensor, "tokens"],
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """As `ops.token_log_probs`, where `head` is this rank's part of the rows, equally many on every rank of `group`.

    `hidden`, `targets` and the results are equal on all ranks, and so is the gradient of `hidden`.
    """
    inverse = row_factors(temperature, hidden)
    first = dist.get_rank(group) * head.shape[0]
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        return _ShardedLogProbs.apply(hidden, head, targets - first, inverse, group)
    return _forward(hidden, head, targets - first, inverse, group)[:2]


def _forward(
    hidden: Tensor, head: Tensor, targets: Tensor, inverse: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    own = hidden.new_empty(3, hidden.shape[0], dtype=torch.float32)
    held = (targets >= 0) & (targets < head.shape[0])
    places = targets.clamp(0, head.shape[0] - 1)
    for rows in row_slices(hidden.shape[0], head):
        logits = ops.linear(hidden[rows], head)
        chosen = logits.gather(1, places[rows, None])[:, 0].float() * inverse[rows]
        _, entropies, normalizers = ops.logits_log_probs(logits, places[rows], inverse[rows])
        own[:, rows] = torch.stack((normalizers, normalizers - entropies, torch.where(held[rows], chosen, 0.0)))
    return _join(own, group)


def _join(own: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and log of the normaliser of the whole vocabulary, from each part's numbers."""
    parts = own.new_empty(dist.get_world_size(group), *own.shape)
    dist.all_gather(list(parts.unbind()), own, group=group)
    normalizers, means, chosen = parts.unbind(1)
    highest = normalizers.amax(0)
    normalizer = highest + ops.log(_added(ops.exp(normalizers - highest)))
    # A part without mass, all of whose logits are -inf, has no mean.
    shares = ops.exp(normalizers - normalizer)
    mean = _added(torch.where(shares > 0, shares * means, 0.0))
    return _added(chosen) - normalizer, normalizer - mean, normalizer


def _added(parts: Float[Tensor, "ranks tokens"]) -> Float[Tensor, "tokens"]:
    """The sum over ranks, one after the other."""
    result, *others = parts.unbind()
    for part in others:
        result = result + part
    return result


class _ShardedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, inverse: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropies, normalizers = _forward(hidden, head, targets, inverse, group)
        # A negative target is no one of this part's.
        targets = torch.where(targets < head.shape[0], targets, -1).clamp(min=-1)
        ctx.save_for_backward(hidden, head, targets, inverse, normalizers)
        ctx.group = group
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, head, targets, inverse, normalizers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head: Tensor | None = None
        for rows in row_slices(hidden.shape[0], head):
            logits = ops.linear(hidden[rows], head)
            grad = logits_gradient(logits, targets[rows], inverse[rows], normalizers[rows], grads[0][rows])
            grad_hidden[rows], part = linear_gradients(grad, hidden[rows], head)
            grad_head = part if grad_head is None else grad_head.float().add_(part)
        dist.all_reduce(grad_hidden, group=ctx.group)
        grad_head = torch.zeros_like(head) if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, grad_head, None, None, None
