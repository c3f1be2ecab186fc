"""Log-probabilities and sampling with a head whose vocabulary is sharded over ranks (loss parallel).

Ranks do not exchange logits. For each row they exchange the masses of the vocabulary's pieces, each of which is on one
rank, and the target's logit: some 25 numbers. Every rank then joins the pieces as one process does, to the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int
from torch import Tensor

from lockstep import ops
from lockstep.ops.head_gradients import ScoredRows, head_gradients, row_slices
from lockstep.ops.head_terms import PLAIN_HEAD, HeadTerms
from lockstep.ops.linear import tree_sum
from lockstep.ops.logprobs import join_masses, masses, row_factors
from lockstep.ops.vocabulary import piece_bounds
from lockstep.parallel.exchange import gather_rows, swap_rows


def sharded_token_log_probs(
    hidden: Float[Tensor, "tokens dim"],
    head: Float[Tensor, "part dim"],
    targets: Int[Tensor, "tokens"],
    temperature: float,
    vocab: int,
    group: dist.ProcessGroup,
    terms: HeadTerms = PLAIN_HEAD,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """As `ops.token_log_probs`, with `head` being this rank's part of the `vocab` rows, split as in `Part`.

    `hidden`, `targets` and the results are equal on all ranks. The gradients of `hidden` are parts of a sum; in one
    order (`ops.one_order`), every rank has the sum.
    """
    inverse = row_factors(temperature, hidden)
    part = Part(vocab, group)
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        return _ShardedLogProbs.apply(hidden, head, targets, inverse, part, terms)
    return _forward(hidden, head, targets, inverse, part, terms)[:2]


class Part:
    """A rank's part of a vocabulary: equally many tokens on every rank of `group`, but fewer on the last."""

    def __init__(self, vocab: int, group: dist.ProcessGroup):
        self.group, self.vocab, self.length = group, vocab, -(-vocab // dist.get_world_size(group))
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.first, self.stop = self.of(self.rank)

    def of(self, rank: int) -> tuple[int, int]:
        """The first token of a rank's part, and the token after its last."""
        return min(rank * self.length, self.vocab), min((rank + 1) * self.length, self.vocab)

    def pieces(self, rank: int, device: torch.device) -> Tensor:
        """The bounds of the vocabulary's pieces within a rank's part."""
        return piece_bounds(self.vocab, device, *self.of(rank))

    def gather(self, local: Tensor) -> Tensor:
        """The equally shaped tensors of all ranks: `[ranks, *shape]`."""
        return gather_rows(local[None], self.group)

    def gather_masses(self, local: Tensor) -> Tensor:
        """The masses `[rows, pieces, 3]` of the whole vocabulary, from each rank's."""
        counts = [len(self.pieces(rank, local.device)) - 1 for rank in range(self.ranks)]
        gathered = self.gather(torch.nn.functional.pad(local, (0, 0, 0, max(counts) - local.shape[1])))
        return torch.cat([masses[:, :count] for masses, count in zip(gathered, counts)], 1)

    def of_holders(self, local: Tensor, tokens: Tensor) -> Tensor:
        """For each row, the value of `local` on the rank that has the row's token."""
        return self.gather(local)[tokens // self.length, torch.arange(len(tokens), device=tokens.device)]

    def drawn(self, tokens: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """For each row, the token id and its logit, from the one rank whose token is not negative."""
        tokens = torch.where(tokens < 0, -1, tokens + self.first)
        gathered = self.gather(torch.stack((tokens.double(), scaled.double())))  # float64 is exact for both
        holders = gathered[:, 0].argmax(0, keepdim=True)
        tokens, scaled = (column.gather(0, holders)[0] for column in gathered.unbind(1))
        return tokens.long(), scaled.float()

    def join_sums(self, local: Float32[Tensor, "pieces rows dim"]) -> Float32[Tensor, "rows dim"]:
        """The tree sum of all pieces of the vocabulary, given those of this part; equal on all ranks."""
        ranks, rows = dist.get_world_size(self.group), local.shape[1]
        counts = [len(self.pieces(rank, local.device)) - 1 for rank in range(ranks)]
        # Each rank adds up an equal share of the rows.
        padded = torch.nn.functional.pad(local, (0, 0, 0, -rows % ranks, 0, max(counts) - len(local)))
        sent = padded.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        received = swap_rows(sent, self.group)
        parts = [part for of_rank, count in zip(received, counts) for part in of_rank[:count].unbind()]
        return gather_rows(tree_sum(parts), self.group)[:rows]

    def places(self, tokens: Tensor) -> Tensor:
        """Tokens as rows of this rank's part; -1 if they are on another rank."""
        return torch.where((tokens >= self.first) & (tokens < self.stop), tokens - self.first, -1)


class ShardedSampler:
    """`ops.sample` and the like over `group`, given the logits of this rank's part of the vocabulary.

    All ranks draw the tokens that one process would.
    """

    def __init__(self, vocab: int, group: dist.ProcessGroup):
        self.part = Part(vocab, group)
        self.sample = partial(ops.sample, part=self.part)
        self.top_log_probs = partial(ops.top_log_probs, part=self.part)
        self.ranked_log_probs = partial(ops.ranked_log_probs, part=self.part)


def _forward(
    hidden: Tensor, head: Tensor, targets: Tensor, inverse: Tensor, part: Part, terms: HeadTerms
) -> tuple[Tensor, Tensor, Tensor]:
    bounds, places = part.pieces(dist.get_rank(part.group), hidden.device), part.places(targets)
    of_rows, chosen = [], []
    for rows in row_slices(len(hidden), part.vocab, head):
        logits = terms.logits(hidden[rows], head)
        of_rows.append(masses(logits, inverse[rows], bounds))
        local = logits.gather(1, places[rows, None].clamp(min=0))[:, 0].float()
        chosen.append(local * inverse[rows])
    if not of_rows:
        empty = hidden.new_empty(3, 0, dtype=torch.float32)
        return empty[0], empty[1], empty[2]
    return join_masses(part.gather_masses(torch.cat(of_rows)), part.of_holders(torch.cat(chosen), targets))


class _ShardedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, inverse: Tensor, part: Part, terms: HeadTerms
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropies, normalizers = _forward(hidden, head, targets, inverse, part, terms)
        ctx.save_for_backward(hidden, head, part.places(targets), inverse, normalizers, entropies)
        ctx.part, ctx.terms = part, terms
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, *scored = ctx.saved_tensors
        part: Part = ctx.part
        bounds = part.pieces(dist.get_rank(part.group), hidden.device)
        rows = ScoredRows(*scored, *grads)
        gradients = head_gradients(hidden, head, rows, part.vocab, bounds, part.join_sums, terms=ctx.terms)
        return *gradients, None, None, None, None
