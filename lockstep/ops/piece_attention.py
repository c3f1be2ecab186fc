"""Attention of pieces of packed sequences over all earlier keys, for ranks that share sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops.attention import Gradients, PackedAttention, _attend, _starts, attend_backward, in_triton
from lockstep.ops.attention_reference import PLAIN, Terms


class PieceAttention:
    """Some rows of `PackedAttention`, bit for bit: queries of pieces, keys and values of whole sequences.

    lengths: tokens of each packed sequence. pieces: (sequence, start, stop) of the queries, piece by piece, in the
    order of the packed sequences. Query rows after them are padding: their output is zero.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        pieces: Sequence[tuple[int, int, int]],
        device: str | torch.device = "cpu",
    ):
        self.whole = PackedAttention(list(lengths), device)
        columns = torch.tensor(pieces, dtype=torch.int32, device=device).reshape(-1, 3)
        sequences, self.contexts = columns[:, 0].long(), columns[:, 2].contiguous()
        self.starts = _starts(columns[:, 2] - columns[:, 1])
        self.first_keys = self.whole.starts[sequences]
        self.table = self.whole.table[sequences]
        self.tokens = sum(stop - start for _, start, stop in pieces)
        """Rows of all pieces, without padding."""
        self._planned: Any = None

    def forward(
        self,
        q: Float[Tensor, "rows heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"] | None,
        terms: Terms = PLAIN,
    ) -> tuple[Float[Tensor, "rows heads head_dim"], Float[Tensor, "rows heads"]]:
        """The attended values and, for the gradient, the log of each row's sum of weights."""
        keys, values = self.whole.pages(k, v)
        if in_triton(q, v):
            from lockstep.ops.cuda import attention

            assert values is not None
            rows = self.table, self.starts, self.contexts
            self._planned = self._planned or attention.Planned(*rows, q, k, ordered=True)
            return attention.attend(q, keys, values, self._planned, terms)
        return _attend(q, keys, values, self.table, self.starts, self.contexts, self.tokens, terms)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        out: Tensor,
        log_sums: Tensor,
        terms: Terms = PLAIN,
    ) -> Gradients:
        """Gradients of `q`, and of the whole sequences' `k` and `v` in float32: the contribution of these pieces."""
        pieces = self.contexts, self.first_keys
        return attend_backward(grad_out, q, k, v, out, log_sums, self.starts, pieces, terms)
