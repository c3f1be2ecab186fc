"""The gradients of log-probabilities: of the hidden states, and of the head or of this rank's part of it.

The logits are computed again, slice by slice. In the one order (`one_order`) a hidden state's gradient is summed over
the vocabulary's pieces, which meet in a tree, and the head's over all ranks' targets.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from lockstep.ops import cuda, native, one_order
from lockstep.ops.linear import input_gradient, linear, product_sums, tree_sum, weight_gradient

SLICE_BYTES = 1 << 27
"""Logits of the whole vocabulary that are held at once. Smaller slices read the head's weight, and write its gradient,
more often."""

Join = Callable[[Float32[Tensor, "pieces rows dim"]], Float32[Tensor, "rows dim"]]


def row_slices(rows: int, vocab: int, element_size: int) -> list[slice]:
    """Rows whose logits are held at once."""
    size = max(1, SLICE_BYTES // (vocab * element_size))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def head_gradients(
    hidden: Float[Tensor, "rows dim"],
    head: Float[Tensor, "part dim"],
    targets: Int[Tensor, "rows"],
    inverse: Float[Tensor, "rows"],
    normalizers: Float[Tensor, "rows"],
    grad: Float[Tensor, "rows"],
    vocab: int,
    bounds: Int[Tensor, "bounds"],
    join: Join = lambda sums: tree_sum(sums.unbind()),
) -> tuple[Float[Tensor, "rows dim"], Float[Tensor, "part dim"]]:
    """Gradients of `hidden` and `head`, given that of the log-probabilities.

    `head` is a part of a vocabulary of `vocab` tokens; `targets` are its rows, or -1 where another part holds them.
    `bounds` are where the vocabulary's pieces lie in the part, `join` adds up the sums of all parts' pieces. Without
    one order the gradient of `hidden` is that of this part alone.
    """
    grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
    shared = one_order.shared_targets()
    slices = row_slices(len(hidden), vocab, head.element_size())
    sums: Tensor | None = None
    for rows in slices:
        logits = linear(hidden[rows], head)
        of_logits = logits_gradient(logits, targets[rows], inverse[rows], normalizers[rows], grad[rows])
        grad_hidden[rows] = hidden_gradient(of_logits, head, bounds, join)
        if shared is None:
            sums = _added(sums, weight_gradient(of_logits, hidden[rows]))
    if shared is None:
        return grad_hidden, grad_head if sums is None else sums.to(head.dtype)
    own = shared.part(len(head))
    targets = shared.gather(targets)
    targets = torch.where((targets >= own.start) & (targets < own.stop), targets - own.start, -1)
    hidden, inverse, normalizers, grad = (shared.gather(x) for x in (hidden, inverse, normalizers, grad))
    for rows in row_slices(len(hidden), vocab, head.element_size()):
        logits = linear(hidden[rows], head[own])
        of_logits = logits_gradient(logits, targets[rows], inverse[rows], normalizers[rows], grad[rows])
        sums = _added(sums, weight_gradient(of_logits, hidden[rows]))
    if sums is not None:
        grad_head[own] = sums.to(head.dtype)
    return grad_hidden, grad_head


def hidden_gradient(
    of_logits: Float[Tensor, "rows part"],
    head: Float[Tensor, "part dim"],
    bounds: Int[Tensor, "bounds"],
    join: Join = lambda sums: tree_sum(sums.unbind()),
) -> Float[Tensor, "rows dim"]:
    """The gradient of hidden states from that of their logits; for `bounds` and `join` see `head_gradients`."""
    if not one_order.is_asked():
        return input_gradient(of_logits, head)
    return join(_sums_by_piece(of_logits, head, bounds)).to(head.dtype)


def _sums_by_piece(grad: Tensor, head: Tensor, bounds: Tensor) -> Float32[Tensor, "pieces rows dim"]:
    sums = grad.new_empty(len(bounds) - 1, len(grad), head.shape[1], dtype=torch.float32)
    for piece, (first, stop) in zip(sums, pairwise(bounds.tolist())):
        piece.copy_(product_sums(grad[:, first:stop], head[first:stop].T))
    return sums


def _added(sums: Tensor | None, part: Tensor) -> Tensor:
    """Slices add up in float32; one slice alone needs no wider copy."""
    return part if sums is None else sums.float().add_(part)


def logits_gradient(
    logits: Float[Tensor, "rows part"], targets: Tensor, inverse: Tensor, normalizers: Tensor, grad: Tensor
) -> Float[Tensor, "rows part"]:
    """d log p(target) / d logits = (onehot - p) / temperature, times the incoming gradient; overwrites `logits`.

    A negative target is not among these logits: they are a part of the vocabulary, and another part holds it.
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
