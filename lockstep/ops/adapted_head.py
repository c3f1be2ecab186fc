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
    of_head: Tensor | None = None
    of_matrices: list[Tensor | None] = [None, None] * len(terms.updates)
    for rows in (slices := row_slices(len(hidden), head.shape[0], head)):
        x, of_slice = hidden[rows], terms.of(rows)
        of_logits = scored_gradient(
            of_slice.logits(x, head) if logits is None else logits, scored.of(rows), terms.softcap
        )
        grad_hidden[rows] = hidden_gradient(of_logits, rounded_head, bounds)
        if trained:
            of_head = added_slice(of_head, weight_gradient(of_logits, format.rounded_rows(x)), len(slices))
        for number, update in enumerate(of_slice.updates):
            of_x, *of_a_and_b = update.gradients(of_logits, x)
            grad_hidden[rows][slice(None) if update.rows is None else update.rows] += of_x
            for place, gradient in enumerate(of_a_and_b, 2 * number):
                of_matrices[place] = added_slice(of_matrices[place], gradient, len(slices))
    matrices = [matrix for update in terms.updates for matrix in (update.a, update.b)]
    rounded = [_rounded(gradient, matrix) for gradient, matrix in zip(of_matrices, matrices)]
    return grad_hidden, _rounded(of_head, head) if trained else None, *rounded


def _rounded(sums: Tensor | None, weight: Tensor) -> Tensor:
    """The gradient in the weight's dtype; None: of no rows."""
    return torch.zeros_like(weight) if sums is None else sums.to(weight.dtype)
