"""Log-probabilities where each rank holds a part of the head's vocabulary (loss parallel).

No rank ever has another's logits: of each row the ranks exchange the masses of the vocabulary's pieces, which they hold
whole, and the chosen logit: some 25 numbers. All then join the pieces as one process does, to the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from lockstep import ops
from lockstep.ops.linear import linear_gradients
from lockstep.ops.logprobs import join_masses, logits_gradient, masses, piece_bounds, row_factors, row_slices


def sharded_token_log_probs(
    hidden: Float[Tensor, "tokens dim"],
    head: Float[Tensor, "part dim"],
    targets: Int[Tensor, "tokens"],
    temperature: float,
    vocab: int,
    group: dist.ProcessGroup,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """As `ops.token_log_probs`, where `head` is this rank's part of the `vocab` rows, cut as `Part` has it.

    `hidden`, `targets` and the results are equal on all ranks; the gradients of `hidden` are parts of its sum.
    """
    inverse = row_factors(temperature, hidden)
    part = Part(vocab, group)
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        return _ShardedLogProbs.apply(hidden, head, targets, inverse, part)
    return _forward(hidden, head, targets, inverse, part)[:2]


class Part:
    """A rank's part of a vocabulary: equally many tokens on every rank of `group`, but fewer or none on the last."""

    def __init__(self, vocab: int, group: dist.ProcessGroup):
        self.group, self.vocab, self.length = group, vocab, -(-vocab // dist.get_world_size(group))
        self.first, self.stop = self.of(dist.get_rank(group))

    def of(self, rank: int) -> tuple[int, int]:
        """The first token of a rank's part, and the one after its last."""
        return min(rank * self.length, self.vocab), min((rank + 1) * self.length, self.vocab)

    def pieces(self, rank: int, device: torch.device) -> Tensor:
        """Where the vocabulary's pieces lie in a rank's part."""
        return piece_bounds(self.vocab, device, *self.of(rank))

    def places(self, tokens: Tensor) -> Tensor:
        """Tokens as rows of this rank's part; -1 where another rank holds them."""
        return torch.where((tokens >= self.first) & (tokens < self.stop), tokens - self.first, -1)


def _forward(
    hidden: Tensor, head: Tensor, targets: Tensor, inverse: Tensor, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    bounds, places = part.pieces(dist.get_rank(part.group), hidden.device), part.places(targets)
    found, chosen = [], []
    for rows in row_slices(hidden.shape[0], head):
        logits = ops.linear(hidden[rows], head)
        found.append(masses(logits, inverse[rows], bounds))
        own = logits.gather(1, places[rows, None].clamp(min=0))[:, 0].float()
        chosen.append(own * inverse[rows])
    if not found:
        empty = hidden.new_empty(3, 0, dtype=torch.float32)
        return empty[0], empty[1], empty[2]
    return _join(torch.cat(found), torch.cat(chosen), targets, part)


def _join(own: Tensor, chosen: Tensor, targets: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and log of the normaliser of the whole vocabulary, from each part's numbers."""
    counts = [len(part.pieces(rank, own.device)) - 1 for rank in range(dist.get_world_size(part.group))]
    numbers = torch.cat([chosen[:, None], own.flatten(1)], 1)
    numbers = torch.nn.functional.pad(numbers, (0, 3 * max(counts) + 1 - numbers.shape[1]))
    everyone = numbers.new_empty(len(counts), *numbers.shape)
    dist.all_gather(list(everyone.unbind()), numbers, group=part.group)
    pieces = [numbers[:, 1 : 1 + 3 * count] for numbers, count in zip(everyone, counts)]
    of_holder = everyone[targets // part.length, torch.arange(len(targets), device=targets.device), 0]
    return join_masses(torch.cat(pieces, 1).unflatten(1, (-1, 3)), of_holder)


class _ShardedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, inverse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropies, normalizers = _forward(hidden, head, targets, inverse, part)
        ctx.save_for_backward(hidden, head, part.places(targets), inverse, normalizers)
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, head, places, inverse, normalizers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head: Tensor | None = None
        for rows in row_slices(hidden.shape[0], head):
            logits = ops.linear(hidden[rows], head)
            grad = logits_gradient(logits, places[rows], inverse[rows], normalizers[rows], grads[0][rows])
            grad_hidden[rows], part = linear_gradients(grad, hidden[rows], head)
            grad_head = part if grad_head is None else grad_head.float().add_(part)
        grad_head = torch.zeros_like(head) if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, grad_head, None, None, None
