"""Attention of packed sequences with shared prefixes, each packed only once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops.attention_gradient import Attended, Gradients, attend_or_train
from lockstep.ops.attention_reference import PLAIN, Terms
from lockstep.ops.packed_attention import PieceAttention


class SharedPrefixAttention:
    """The trainer's attention when sequences omit a prefix that they share with an earlier one.

    lengths: keys of each sequence, including shared ones. shared: the number of leading tokens that each sequence omits
    because the last complete sequence before it starts with the same ones. Rows after them are padding.

    All keys of a sequence, shared or not, are in pages of that sequence, in blocks aligned to its position 0. So a row
    has the same bits as in `PackedAttention` with complete sequences. The gradient of a shared key is summed in
    float32: first that of the sequence it is packed with, then that of each sequence that omits it, in order.

    Raises ValueError if a sequence omits more than can be shared, or all of its tokens.
    """

    row_counts: Int[Tensor, "rows"] | None = None
    """As in `PackedAttention`."""

    def __init__(self, lengths: Sequence[int], shared: Sequence[int], device: str | torch.device = "cpu"):
        self.pieces = PieceAttention(lengths, [(i, n, lengths[i]) for i, n in enumerate(shared)], device)
        self.tokens = self.pieces.tokens
        length, left_out = (np.asarray(each, dtype=np.int64) for each in (lengths, shared))
        leads = np.maximum.accumulate(np.where(left_out == 0, np.arange(len(length)), 0))  # whom each shares with
        _refuse_too_much(length, left_out, np.where(left_out[leads] == 0, length[leads], 0))
        first_rows, first_keys = _starts(length - left_out), _starts(length)
        # For every key of every sequence: its sequence, its position there, and the row that it is computed in.
        sequences = np.repeat(np.arange(len(length)), length)
        positions = np.arange(len(sequences)) - first_keys[sequences]
        is_shared = positions < left_out[sequences]
        keys = positions + np.where(is_shared, first_rows[leads[sequences]], (first_rows - left_out)[sequences])
        copies = is_shared.nonzero()[0]
        turns = (np.arange(len(length)) - leads)[sequences[copies]]
        of_turns = [copies[turns == turn] for turn in range(1, turns.max(initial=0) + 1)]
        self._keys = torch.from_numpy(keys).to(device)
        # For every row, its key in the sequence that it is packed with.
        self._packed = torch.from_numpy((~is_shared).nonzero()[0]).to(device)
        # Per turn i: the rows that the i-th sequence after theirs omits, and the indices of its copies of their keys.
        self._turns = [tuple(torch.from_numpy(each).to(device) for each in (keys[turn], turn)) for turn in of_turns]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, terms: Terms = PLAIN) -> Tensor:
        return attend_or_train(self, q, k, v, terms)

    def forward(
        self,
        q: Float[Tensor, "rows heads head_dim"],
        k: Float[Tensor, "rows kv_heads head_dim"],
        v: Float[Tensor, "rows kv_heads head_dim"] | None,
        terms: Terms = PLAIN,
    ) -> tuple[Float[Tensor, "rows heads head_dim"], Float[Tensor, "rows heads"]]:
        """The attended values and, for the gradient, the log of each row's sum of weights."""
        return self.pieces.forward(q, *self._of_keys(k, v), terms)

    def backward(self, grad_out: Tensor, attended: Attended, terms: Terms = PLAIN) -> Gradients:
        """Gradients of queries, keys and values, in their dtype."""
        k = attended.k
        keys, values = self._of_keys(k, attended.v)
        grad_q, grad_k, grad_v = self.pieces.backward(grad_out, attended._replace(k=keys, v=values), terms)
        return grad_q, self._summed(grad_k, k), None if grad_v is None else self._summed(grad_v, k)

    def _of_keys(self, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The rows of all sequences' keys and values."""
        return k.index_select(0, self._keys), None if v is None else v.index_select(0, self._keys)

    def _summed(self, of_keys: Tensor, like: Tensor) -> Tensor:
        sums = of_keys.new_zeros(like.shape)
        torch.index_select(of_keys, 0, self._packed, out=sums[: len(self._packed)])
        # A row occurs in a turn at most once, so its sum is in the order of the turns.
        for rows, copies in self._turns:
            sums.index_add_(0, rows, of_keys.index_select(0, copies))
        return sums.to(like.dtype)


def _starts(counts: np.ndarray) -> np.ndarray:
    """Where each of consecutive runs begins."""
    return counts.cumsum() - counts


def _refuse_too_much(lengths: np.ndarray, left_out: np.ndarray, available: np.ndarray) -> None:
    """available: how many tokens the sequence before has that each can share them with."""
    for sequence in ((left_out > 0) & ((left_out > available) | (left_out >= lengths))).nonzero()[0]:
        raise ValueError(
            f"sequence {sequence} of {lengths[sequence]} tokens omits {left_out[sequence]}: at most "
            f"{available[sequence]} can be shared, and never its last token"
        )
