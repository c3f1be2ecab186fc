"""Gradients of log-probabilities under a head with the updates of low-rank adapters."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops.formats import FORMATS
from lockstep.ops.head_gradients import ScoredRows, added_slice, hidden_gradient, row_slices, scored_gradient
from lockstep.ops.head_terms import HeadTerms
from lockstep.ops.linear import weight_gradient
from lockstep.ops.vocabulary import piece_bounds


def adapted_head_gradients(
    hidden: Float[Tensor, "rows dim"],
    head: Float[Tensor, "vocab dim"],
    scored: ScoredRows,
    terms: HeadTerms,
    logits: Float[Tensor, "rows vocab"] | None = None,
    trained: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of `hidden`, of `head` if it is `trained`, and of A and B of each of the terms' updates.

    `logits` are as in `head_gradients`. The targets must not be shared with other ranks.
    """
    format, bounds = FORMATS[terms.format], piece_bounds(head.shape[0])
    grad_hidden, rounded_head = torch.empty_like(hidden), format.rounded_weight(head)
    weights = [head, *(matrix for update in terms.updates for matrix in (update.a, update.b))]
    sums: list[Tensor | None] = [None] * len(weights)
    for rows in (slices := row_slices(len(hidden), head.shape[0], head)):
        x, of_slice = hidden[rows], terms.of(rows)
        of_logits = scored_gradient(
            of_slice.logits(x, head) if logits is None else logits, scored.of(rows), terms.softcap
        )
        grad_hidden[rows] = hidden_gradient(of_logits, rounded_head, bounds)
        if trained:
            sums[0] = added_slice(sums[0], weight_gradient(of_logits, format.rounded_rows(x)), len(slices))
        for number, update in enumerate(of_slice.updates):
            of_x, *of_matrices = update.gradients(of_logits, x)
            grad_hidden[rows][slice(None) if update.rows is None else update.rows] += of_x
            for place, gradient in enumerate(of_matrices, 1 + 2 * number):
                sums[place] = added_slice(sums[place], gradient, len(slices))
    gradients = [torch.zeros_like(w) if s is None else s.to(w.dtype) for w, s in zip(weights, sums)]
    return grad_hidden, gradients[0] if trained else None, *gradients[1:]
