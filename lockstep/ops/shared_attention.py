"""Attention of packed sequences with shared prefixes, each packed only once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lockstep.ops.attention import in_triton
from lockstep.ops.attention_gradient import Attended, Gradients, attend_or_train
from lockstep.ops.attention_reference import PLAIN, Terms
from lockstep.ops.delta import delta
from lockstep.ops.delta_reference import DeltaTerms
from lockstep.ops.packed_attention import PackedAttention, PieceAttention


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
        length, left_out = (np.asarray(each, dtype=np.int32) for each in (lengths, shared))
        self._host = _refused_if_too_much(length, left_out)
        of_keys, of_rows = int(length.sum()), int((length - left_out).sum())
        whole = PackedAttention(length.tolist(), device)
        self._lay_out(whole, torch.from_numpy(left_out).to(device), of_rows, of_keys)

    @classmethod
    def of_contexts(
        cls,
        contexts: Int[Tensor, "sequences"],
        left_out: Int[Tensor, "sequences"],
        rows: int,
        keys: int,
        longest: int,
    ) -> SharedPrefixAttention:
        """For a CUDA graph, as `PackedAttention.of_contexts`. rows and keys: padding included."""
        attention = cls.__new__(cls)
        attention._lay_out(PackedAttention.of_contexts(contexts, keys, longest), left_out, rows, keys)
        return attention

    def _lay_out(self, whole: PackedAttention, left_out: Tensor, rows: int, keys: int) -> None:
        self.contexts, self.longest, self.left_out, self.keys = whole.contexts, whole.longest, left_out, keys
        self.pieces = PieceAttention.of_ends(whole, whole.contexts - left_out, rows)
        self.tokens = rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, terms: Terms = PLAIN) -> Tensor:
        return attend_or_train(self, q, k, v, terms)

    def delta(self, layer: int, mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms) -> Tensor:
        """Computes shared rows again for each sequence that omits them, from the same inputs."""
        rows = len(mixed)
        mixed, b, a = (_RowsOfKeys.apply(x, self) for x in (mixed, b, a))
        out = delta(mixed, b, a, terms, self.pieces.whole.starts)
        if in_triton(out, out):
            plan = self._on_device
            return torch.where(plan.is_row[:, None, None], out.index_select(0, plan.packed), 0.0)
        packed = self._on_host.packed
        return F.pad(out.index_select(0, packed), (0, 0, 0, 0, 0, rows - len(packed)))

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
        return grad_q, self.summed(grad_k, k), None if grad_v is None else self.summed(grad_v, k)

    def _of_keys(self, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The rows of all sequences' keys and values."""
        keys = self.rows_of_keys(in_triton(k, v))
        return k.index_select(0, keys), None if v is None else v.index_select(0, keys)

    def rows_of_keys(self, on_device: bool) -> Tensor:
        """For every key of every sequence, the row that computes it. on_device: without reading a value on the CPU."""
        return self._on_device.keys if on_device else self._on_host.keys

    def summed(self, of_keys: Tensor, like: Tensor) -> Tensor:
        """Gradients of every sequence's keys, summed by the row that computes them, shaped and rounded as `like`."""
        if in_triton(like, like):
            from lockstep.ops.cuda import attention_backward

            starts, first_keys = self.pieces.starts, self.pieces.first_keys
            return attention_backward.sum_copies(of_keys, like, starts, self.left_out, first_keys, self._on_device.ends)
        plan, sums = self._on_host, of_keys.new_zeros(like.shape)
        torch.index_select(of_keys, 0, plan.packed, out=sums[: len(plan.packed)])
        # A row occurs in a turn at most once, so its sum is in the order of the turns.
        for rows, copies in plan.turns:
            sums.index_add_(0, rows, of_keys.index_select(0, copies))
        return sums.to(like.dtype)

    @cached_property
    def _on_host(self) -> _OnHost:
        return _OnHost.of(*self._host, self.left_out.device)

    @cached_property
    def _on_device(self) -> _OnDevice:
        return _OnDevice.of(self.pieces, self.left_out, self.keys, self.tokens)


class _RowsOfKeys(torch.autograd.Function):
    """The rows of all sequences' keys; a row's gradient is the sum of its keys', in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, attention: SharedPrefixAttention) -> Tensor:
        ctx.attention, ctx.shape = attention, x.shape
        return x.index_select(0, attention.rows_of_keys(in_triton(x, x)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.attention.summed(grads[0].float(), grads[0].new_empty(ctx.shape)), None


class _OnHost(NamedTuple):
    """Computed with NumPy: of a short row, each of PyTorch's operators takes as long as a kernel."""

    keys: Tensor
    """For every key of every sequence, the row that computes it."""
    packed: Tensor
    """For every row, its key in the sequence that it is packed with."""
    turns: list[tuple[Tensor, Tensor]]
    """Per turn i: the rows that the i-th sequence after theirs omits, and the indices of its copies of their keys."""

    @classmethod
    def of(cls, length: np.ndarray, left_out: np.ndarray, leads: np.ndarray, device: torch.device) -> _OnHost:
        first_rows, first_keys = _starts(length - left_out), _starts(length)
        # For every key of every sequence: its sequence, and its position there.
        sequences = np.repeat(np.arange(len(length)), length)
        positions = np.arange(len(sequences)) - first_keys[sequences]
        is_shared = positions < left_out[sequences]
        keys = positions + np.where(is_shared, first_rows[leads[sequences]], (first_rows - left_out)[sequences])
        copies = is_shared.nonzero()[0]
        turns = (np.arange(len(length)) - leads)[sequences[copies]]
        of_turns = [copies[turns == turn] for turn in range(1, turns.max(initial=0) + 1)]
        return cls(
            torch.from_numpy(keys).to(device),
            torch.from_numpy((~is_shared).nonzero()[0]).to(device),
            [(torch.from_numpy(keys[turn]).to(device), torch.from_numpy(turn).to(device)) for turn in of_turns],
        )


class _OnDevice(NamedTuple):
    """Computed without reading a value on the CPU."""

    keys: Tensor
    """For every key of every sequence, the row that computes it; row 0 or the last for padding."""
    ends: Int[Tensor, "sequences"]
    """The end of the sequences that share with each, int32."""
    packed: Tensor
    """For every row, its key in the sequence that it is packed with; any key for padding."""
    is_row: Bool[Tensor, "rows"]
    """Whether a row is no padding."""

    @classmethod
    def of(cls, pieces: PieceAttention, left_out: Tensor, keys: int, rows: int) -> _OnDevice:
        starts, first_keys = pieces.starts, pieces.whole.starts
        number = torch.arange(len(left_out), dtype=torch.int32, device=left_out.device)
        leads = torch.where(left_out == 0, number, 0).cummax(0).values
        ends = torch.where(left_out == 0, torch.searchsorted(leads, number, right=True), number + 1)
        key = torch.arange(keys, dtype=torch.int32, device=left_out.device)
        sequence = torch.searchsorted(first_keys[1:].contiguous(), key, right=True).clamp(max=len(left_out) - 1)
        position = key - first_keys[sequence]
        is_shared = position < left_out[sequence]
        row = position + torch.where(is_shared, starts[leads[sequence]], (starts[:-1] - left_out)[sequence])
        of_row = torch.arange(rows, dtype=torch.int32, device=left_out.device)
        home = torch.searchsorted(starts[1:].contiguous(), of_row, right=True).clamp(max=len(left_out) - 1)
        packed = of_row + (first_keys[:-1] + left_out - starts[:-1])[home]
        return cls(row.clamp(0, rows - 1), ends.to(torch.int32), packed.clamp(max=keys - 1), of_row < starts[-1])


def _starts(counts: np.ndarray) -> np.ndarray:
    """Where each of consecutive runs begins."""
    return counts.cumsum() - counts


def _refused_if_too_much(lengths: np.ndarray, left_out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both, and the sequence that each shares with. Raises ValueError."""
    leads = np.maximum.accumulate(np.where(left_out == 0, np.arange(len(lengths)), 0))
    available = np.where(left_out[leads] == 0, lengths[leads], 0)
    for sequence in ((left_out > 0) & ((left_out > available) | (left_out >= lengths))).nonzero()[0]:
        raise ValueError(
            f"sequence {sequence} of {lengths[sequence]} tokens omits {left_out[sequence]}: at most "
            f"{available[sequence]} can be shared, and never its last token"
        )
    return lengths, left_out, leads
