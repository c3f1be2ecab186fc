"""Embedding lookup: the row of a table for each token, with a quantized head that is tied to it: the rounded row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import one_order
from lockstep.ops.formats import FORMATS, NONE
from lockstep.ops.forms import FORMS
from lockstep.ops.packed_weights import PackedWeight


def embedding(
    tokens: Int[Tensor, "tokens"], weight: Float[Tensor, "vocab dim"], format: str = NONE
) -> Float[Tensor, "tokens dim"]:
    """`weight[tokens]`, of the numbers that `weight` has in a format, a key of `FORMATS`. The gradient is that of the
    lookup, with rounding as the identity."""
    if isinstance(weight, PackedWeight):
        return weight.numbers(tokens)
    form = FORMS.get(type(weight))
    rows: Tensor = plain_embedding(tokens, weight) if form is None else form.embedding(tokens, weight)
    return rows if format == NONE else _Rounded.apply(rows, format)


class _Rounded(torch.autograd.Function):
    """Rounds each row as the head does, whose scales are those of a row or of a part of it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, format: str) -> Tensor:
        return FORMATS[format].rounded_weight(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


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
