"""Embedding lookup: the row of a table for each token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import one_order
from lockstep.ops.forms import FORMS


def embedding(tokens: Int[Tensor, "tokens"], weight: Float[Tensor, "vocab dim"]) -> Float[Tensor, "tokens dim"]:
    """`weight[tokens]`."""
    if (form := FORMS.get(type(weight))) is not None:
        return form.embedding(tokens, weight)
    return plain_embedding(tokens, weight)


def plain_embedding(tokens: Int[Tensor, "tokens"], weight: Float[Tensor, "vocab dim"]) -> Float[Tensor, "tokens dim"]:
    """`embedding` of a plain weight. If one order is required, its gradient sums the tokens of all ranks."""
    if one_order.shared_tokens() is None:
        return F.embedding(tokens, weight)
    return _SharedEmbedding.apply(tokens, weight)


class _SharedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        tokens, weight = ctx.saved_tensors
        shared = one_order.shared_tokens()
        assert shared is not None
        tokens, grad = shared.gather(tokens), shared.gather(grads[0])
        # The rows whose head gradient this rank also computes: with tied embeddings, both are added on one rank.
        part = shared.part(len(weight))
        local = (tokens >= part.start) & (tokens < part.stop)
        whole = torch.zeros_like(weight)
        rows = part.stop - part.start
        whole[part] = torch.ops.aten.embedding_dense_backward(grad[local], tokens[local] - part.start, rows, -1, False)
        return None, whole
