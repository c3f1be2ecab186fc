"""Gradients of log-probabilities with respect to the hidden states and the head, or this rank's part of the head.

The logits are recomputed slice by slice, or saved by the forward if they are few. With one order (`one_order`), a
hidden state's gradient is summed over the vocabulary's pieces, which are joined in a tree, and the head's over all
ranks' targets.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from lockstep.ops import cuda, native, one_order, plain
from lockstep.ops.formats import FORMATS
from lockstep.ops.head_terms import PLAIN_HEAD, HeadTerms
from lockstep.ops.linear import input_gradient, product_sums, tree_sum, weight_gradient
from lockstep.ops.softcap import softcap_gradient

SLICE_BYTES, GPU_SLICE_BYTES = 1 << 27, 1 << 30
"""Most bytes of logits, of the whole vocabulary, in memory at a time. Smaller slices read the head's weight and write
its gradient more often."""
SAVED_LOGITS_BYTES = 1 << 25
"""Most bytes of logits that a forward saves for its backward: several forward passes can be in flight."""

Join = Callable[[Float32[Tensor, "pieces rows dim"]], Float32[Tensor, "rows dim"]]


def row_slices(rows: int, vocab: int, head: Tensor) -> list[slice]:
    """Slices of rows whose logits are in memory at a time; `head` may be a part of one for `vocab` tokens."""
    size = max(1, (GPU_SLICE_BYTES if head.is_cuda else SLICE_BYTES) // (vocab * head.element_size()))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class ScoredRows(NamedTuple):
    """Columns with one entry per scored row, among them the gradients of its log-probability and its entropy."""

    targets: Int[Tensor, "rows"]
    """Row of the head for each target; in a part of the head, -1 if the target is in another part."""
    inverse_temperature: Float[Tensor, "rows"]
    normalizers: Float[Tensor, "rows"]
    entropies: Float[Tensor, "rows"]
    grad: Float[Tensor, "rows"] | None
    """None if zero, as `entropy_grad`."""
    entropy_grad: Float[Tensor, "rows"] | None

    def map(self, function: Callable[[Tensor], Tensor]) -> ScoredRows:
        """Applies `function` to every column."""
        columns: list[Any] = [None if column is None else function(column) for column in self]
        return ScoredRows(*columns)

    def of(self, rows: slice) -> ScoredRows:
        return self.map(lambda column: column[rows])


def head_gradients(
    hidden: Float[Tensor, "rows dim"],
    head: Float[Tensor, "part dim"],
    scored: ScoredRows,
    vocab: int,
    bounds: Int[Tensor, "bounds"],
    join: Join = lambda sums: tree_sum(sums.unbind()),
    logits: Float[Tensor, "rows part"] | None = None,
    terms: HeadTerms = PLAIN_HEAD,
    trained: bool = True,
) -> tuple[Float[Tensor, "rows dim"], Float[Tensor, "part dim"] | None]:
    """Gradients of `hidden`, and of `head` if it is `trained`, given those of the log-probabilities and entropies.

    `head` is a part of a vocabulary of `vocab` tokens. `bounds` are the bounds of the vocabulary's pieces in the part;
    `join` adds the sums of all parts' pieces. Without one order, the gradient of `hidden` is only that of this part.
    `logits`, of all rows in one slice and capped, are overwritten; None: they are recomputed.
    """
    format = FORMATS[terms.format]
    grad_hidden, rounded_head = torch.empty_like(hidden), format.rounded_weight(head)
    shared = one_order.shared_targets()
    sums: Tensor | None = None
    for rows in (slices := row_slices(len(hidden), vocab, head)):
        of_slice = terms.logits(hidden[rows], head) if logits is None else logits
        of_logits = scored_gradient(of_slice, scored.of(rows), terms.softcap)
        grad_hidden[rows] = hidden_gradient(of_logits, rounded_head, bounds, join)
        if trained and shared is None:
            sums = added_slice(sums, weight_gradient(of_logits, format.rounded_rows(hidden[rows])), len(slices))
    if not trained:
        return grad_hidden, None
    if shared is None:
        return grad_hidden, torch.zeros_like(head) if sums is None else sums.to(head.dtype)
    part, hidden, scored = shared.part(len(head)), shared.gather(hidden), scored.map(shared.gather)
    local = (scored.targets >= part.start) & (scored.targets < part.stop)
    scored = scored._replace(targets=torch.where(local, scored.targets - part.start, -1))
    for rows in (slices := row_slices(len(hidden), vocab, head)):
        of_logits = scored_gradient(terms.logits(hidden[rows], head[part]), scored.of(rows), terms.softcap)
        sums = added_slice(sums, weight_gradient(of_logits, format.rounded_rows(hidden[rows])), len(slices))
    grad_head = torch.zeros_like(head)
    if sums is not None:
        grad_head[part] = sums.to(head.dtype)
    return grad_hidden, grad_head


def hidden_gradient(
    of_logits: Float[Tensor, "rows part"],
    head: Float[Tensor, "part dim"],
    bounds: Int[Tensor, "bounds"],
    join: Join = lambda sums: tree_sum(sums.unbind()),
) -> Float[Tensor, "rows dim"]:
    """The gradient of hidden states, given that of their logits; for `bounds` and `join`, see `head_gradients`."""
    if not one_order.is_required():
        return input_gradient(of_logits, head)
    return join(_sums_by_piece(of_logits, head, bounds)).to(head.dtype)


def _sums_by_piece(grad: Tensor, head: Tensor, bounds: Tensor) -> Float32[Tensor, "pieces rows dim"]:
    sums = grad.new_empty(len(bounds) - 1, len(grad), head.shape[1], dtype=torch.float32)
    for piece, (first, stop) in zip(sums, pairwise(bounds.tolist())):
        piece.copy_(product_sums(grad[:, first:stop], head[first:stop].T))
    return sums


def added_slice(
    sums: Float[Tensor, "part dim"] | None, of_slice: Float[Tensor, "part dim"], slices: int
) -> Float[Tensor, "part dim"]:
    """Adds one slice's gradient of the head. Several slices accumulate in float32; a single one needs no wider copy."""
    if sums is not None:
        return sums.add_(of_slice)
    return of_slice if slices == 1 else of_slice.float()


def scored_gradient(
    logits: Float[Tensor, "rows part"], scored: ScoredRows, softcap: float
) -> Float[Tensor, "rows part"]:
    """The gradient of logits before their cap, if any, given the capped ones, which are overwritten."""
    if not softcap:
        return _both_gradients(logits, scored)
    capped = logits.clone()
    return softcap_gradient(_both_gradients(logits, scored), capped, softcap)


def _both_gradients(logits: Tensor, scored: ScoredRows) -> Tensor:
    """`logits_gradient`, plus the gradient through the entropies if there is one. Overwrites `logits`."""
    targets, inverse, normalizers, entropies, grad, entropy_grad = scored
    grad = torch.zeros_like(entropies) if grad is None else grad
    if entropy_grad is None:
        return logits_gradient(logits, targets, inverse, normalizers, grad)
    of_entropies = _entropy_gradient(logits, inverse, normalizers, entropies, entropy_grad)
    return (logits_gradient(logits, targets, inverse, normalizers, grad).float() + of_entropies).to(logits.dtype)


def _entropy_gradient(logits: Tensor, inverse: Tensor, normalizers: Tensor, entropies: Tensor, grad: Tensor) -> Tensor:
    """d entropy / d logits = −p (log p + entropy) / temperature, times the incoming gradient; float32."""
    log_p = logits.float() * inverse[:, None] - normalizers[:, None]
    p = plain.exp(log_p)
    return (p * (log_p + entropies[:, None])).masked_fill(p == 0, 0.0) * -(grad * inverse)[:, None]


def logits_gradient(
    logits: Float[Tensor, "rows part"], targets: Tensor, inverse: Tensor, normalizers: Tensor, grad: Tensor
) -> Float[Tensor, "rows part"]:
    """d log p(target) / d logits = (onehot - p) / temperature, times the incoming gradient; overwrites `logits`.

    A negative target is in another part of the vocabulary.
    """
    if cuda.usable(logits):
        from lockstep.ops.cuda import vocabulary

        return vocabulary.logits_gradient(logits, targets, inverse, normalizers, grad)
    if native.usable(logits):
        factors = (targets, inverse, normalizers, grad.contiguous())
        native.call("log_probs_backward", logits.dtype, logits, *factors, *logits.shape)
        return logits
    factor = (grad * inverse)[:, None]
    gradient = torch.exp(logits.float() * inverse[:, None] - normalizers[:, None]) * -factor
    chosen = torch.where(targets[:, None] < 0, 0.0, factor)
    return gradient.scatter_add(1, targets[:, None].clamp(min=0), chosen).to(logits.dtype)
