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
from lockstep.ops.logprobs import both_gradients, join_masses, masses, piece_bounds, row_factors, row_slices


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
    """A rank's part of a vocabulary: equally many tokens on every rank of `group`, but for fewer on the last."""

    def __init__(self, vocab: int, group: dist.ProcessGroup):
        self.group, self.vocab, self.length = group, vocab, -(-vocab // dist.get_world_size(group))
        self.first, self.stop = self.of(dist.get_rank(group))

    def of(self, rank: int) -> tuple[int, int]:
        """The first token of a rank's part, and the one after its last."""
        return min(rank * self.length, self.vocab), min((rank + 1) * self.length, self.vocab)

    def pieces(self, rank: int, device: torch.device) -> Tensor:
        """Where the vocabulary's pieces lie in a rank's part."""
        return piece_bounds(self.vocab, device, *self.of(rank))

    def bounds(self) -> Tensor:
        """Where the pieces of the whole vocabulary begin, and the end of the last; on the CPU."""
        return piece_bounds(self.vocab)

    def gather_masses(self, own: Tensor) -> Tensor:
        """The masses `[rows, pieces, 3]` of the whole vocabulary, from each rank's."""
        ranks = dist.get_world_size(self.group)
        counts = [len(self.pieces(rank, own.device)) - 1 for rank in range(ranks)]
        padded = torch.nn.functional.pad(own, (0, 0, 0, max(counts) - own.shape[1]))
        everyone = padded.new_empty(ranks, *padded.shape)
        dist.all_gather(list(everyone.unbind()), padded, group=self.group)
        return torch.cat([masses[:, :count] for masses, count in zip(everyone, counts)], 1)

    def of_holders(self, own: Tensor, tokens: Tensor) -> Tensor:
        """Of each row what the rank that holds its token has in `own`."""
        everyone = own.new_empty(dist.get_world_size(self.group), *own.shape)
        dist.all_gather(list(everyone.unbind()), own, group=self.group)
        return everyone[tokens // self.length, torch.arange(len(tokens), device=tokens.device)]

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
    return join_masses(part.gather_masses(torch.cat(found)), part.of_holders(torch.cat(chosen), targets))


class _ShardedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, inverse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropies, normalizers = _forward(hidden, head, targets, inverse, part)
        ctx.save_for_backward(hidden, head, part.places(targets), inverse, normalizers, entropies)
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, head, places, inverse, normalizers, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head: Tensor | None = None
        for rows in row_slices(hidden.shape[0], head):
            logits = ops.linear(hidden[rows], head)
            of_rows = places[rows], inverse[rows], normalizers[rows], entropies[rows]
            grad = both_gradients(logits, *of_rows, *(None if g is None else g[rows] for g in grads))
            grad_hidden[rows], part = linear_gradients(grad, hidden[rows], head)
            grad_head = part if grad_head is None else grad_head.float().add_(part)
        grad_head = torch.zeros_like(head) if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, grad_head, None, None, None
