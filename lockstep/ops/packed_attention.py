"""The trainer's attention: packed complete sequences, or pieces of them over all earlier keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops.attention import PAGE, attend, in_triton, paged_width, row_starts, slots_of, write_pages
from lockstep.ops.attention_gradient import Attended, Gradients, attend_backward, attend_or_train
from lockstep.ops.attention_reference import PLAIN, Terms
from lockstep.ops.delta import delta
from lockstep.ops.delta_reference import DeltaTerms


class PackedAttention:
    """Packed complete sequences. Rows after them are padding."""

    row_counts: Int[Tensor, "tokens"] | None = None
    """How often each row counts in the experts' load (`counted_rows`); None: once."""

    def __init__(self, lengths: list[int], device: str | torch.device = "cpu"):
        contexts = torch.tensor(lengths, dtype=torch.int32)
        pages = _pages_of(contexts)
        # Sizes are computed on the CPU: reading them from a GPU would wait for it.
        self._lay_out(contexts.to(device), int(pages.sum()), max(lengths, default=0), sum(lengths))
        if self.contexts.device.type == "cpu":
            self.slots  # noqa: B018 - computed here from real values: a dry run calls it with tensors that have none

    @classmethod
    def of_contexts(cls, contexts: Int[Tensor, "sequences"], rows: int, longest: int) -> PackedAttention:
        """For a CUDA graph: of sequences whose lengths, int32 and 0 for padding, are read on the device alone.

        rows: those of the packed row, padding included. longest: at least the longest sequence.
        """
        attention = cls.__new__(cls)
        attention._lay_out(contexts, rows // PAGE + len(contexts), longest, rows)
        return attention

    def _lay_out(self, contexts: Int[Tensor, "sequences"], num_pages: int, longest: int, tokens: int) -> None:
        """num_pages: at least those of all sequences. longest: at least the tokens of the longest."""
        self.contexts, self.num_pages, self.longest = contexts, num_pages, longest
        self.starts = row_starts(contexts)
        pages = _pages_of(contexts)
        ends = pages.cumsum(0)
        # Every sequence has separate pages, in order; a shorter sequence's table row continues into other pages, whose
        # keys are masked.
        columns = torch.arange(-(-longest // PAGE), device=contexts.device)
        self.table = ((ends - pages)[:, None] + columns).clamp(max=num_pages - 1).to(torch.int32)
        self.tokens = tokens
        """Rows of all sequences, without padding if their lengths are known."""
        self._pages, self._ends = pages, ends
        self.planned: Any = None

    @cached_property
    def slots(self) -> Int[Tensor, "tokens"]:
        """The slot of each row's key and value."""
        return slots_of(self.table, self.starts, self.contexts)

    @cached_property
    def page_rows(self) -> tuple[Int[Tensor, "pages"], Int[Tensor, "pages"]]:
        """Each page's first row of keys, and the end of its sequence's rows, int32."""
        page = torch.arange(self.num_pages, device=self.table.device)
        sequence = torch.searchsorted(self._ends, page, right=True).clamp(max=len(self.contexts) - 1)
        inside = page - (self._ends - self._pages)[sequence]
        return (self.starts[sequence] + inside * PAGE).to(torch.int32), self.starts[sequence + 1]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, terms: Terms = PLAIN) -> Tensor:
        return attend_or_train(self, q, k, v, terms)

    def delta(self, layer: int, mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms) -> Tensor:
        return delta(mixed, b, a, terms, self.starts)

    def forward(self, q: Tensor, k: Tensor, v: Tensor | None, terms: Terms = PLAIN) -> tuple[Tensor, Tensor]:
        """The attended values and, for the gradient, the log of each row's sum of weights `[tokens, heads]`."""
        return _attend_in_order(self, q, *self.pages(k, v), terms)

    def backward(self, grad_out: Tensor, attended: Attended, terms: Terms = PLAIN) -> Gradients:
        """Gradients of queries, keys and values, in their dtype."""
        return attend_backward(grad_out, attended, self.starts, terms=terms)

    def pages(self, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Keys and values in pages, laid out as in `KVCache`."""
        if in_triton(k, v):
            from lockstep.ops.cuda import attention

            assert v is not None
            return attention.ordered_pages(k, v, *self.page_rows)
        tokens, kv_heads = self.slots.shape[0], k.shape[1]
        width = paged_width(k.shape[2], k)
        keys = k.new_zeros(self.num_pages, kv_heads, width, PAGE)
        values = None if v is None else v.new_zeros(self.num_pages, kv_heads, PAGE, width)
        write_pages(k[:tokens], None if v is None else v[:tokens], self.slots, keys, values)
        return keys, values


def _pages_of(contexts: Int[Tensor, "sequences"]) -> Int[Tensor, "sequences"]:
    return (contexts + PAGE - 1) // PAGE


class PieceAttention:
    """Some rows of `PackedAttention`, bit for bit: queries of pieces, keys and values of whole sequences.

    For ranks that share sequences.

    lengths: tokens of each packed sequence. pieces: (sequence, start, stop) of the queries, piece by piece, in the
    order of the packed sequences. Query rows after them are padding: their output is zero.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        pieces: Sequence[tuple[int, int, int]],
        device: str | torch.device = "cpu",
    ):
        columns = torch.tensor(pieces, dtype=torch.int32, device=device).reshape(-1, 3)
        whole, sequences = PackedAttention(list(lengths), device), columns[:, 0].long()
        counts, contexts = columns[:, 2] - columns[:, 1], columns[:, 2].contiguous()
        tokens = sum(stop - start for _, start, stop in pieces)
        self._lay_out(whole, counts, contexts, whole.starts[sequences], whole.table[sequences], tokens)

    @classmethod
    def of_ends(cls, whole: PackedAttention, counts: Int[Tensor, "sequences"], tokens: int) -> PieceAttention:
        """The last `counts[i]` rows of each of `whole`'s sequences, int32. tokens: their sum, or with padding."""
        attention = cls.__new__(cls)
        attention._lay_out(whole, counts, whole.contexts, whole.starts[:-1], whole.table, tokens)
        return attention

    def _lay_out(
        self, whole: PackedAttention, counts: Tensor, contexts: Tensor, first_keys: Tensor, table: Tensor, tokens: int
    ) -> None:
        self.whole, self.contexts, self.first_keys, self.table = whole, contexts, first_keys, table
        self.starts = row_starts(counts)
        self.tokens = tokens
        """Rows of all pieces, without padding if their numbers are known."""
        self.planned: Any = None

    def forward(
        self,
        q: Float[Tensor, "rows heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"] | None,
        terms: Terms = PLAIN,
    ) -> tuple[Float[Tensor, "rows heads head_dim"], Float[Tensor, "rows heads"]]:
        """The attended values and, for the gradient, the log of each row's sum of weights."""
        return _attend_in_order(self, q, *self.whole.pages(k, v), terms)

    def backward(self, grad_out: Tensor, attended: Attended, terms: Terms = PLAIN) -> Gradients:
        """Gradients of queries, and of the whole sequences' keys and values in float32: these pieces' share."""
        return attend_backward(grad_out, attended, self.starts, (self.contexts, self.first_keys), terms)


def _attend_in_order(
    rows: PackedAttention | PieceAttention, q: Tensor, keys: Tensor, values: Tensor | None, terms: Terms
) -> tuple[Tensor, Tensor]:
    """Attention over pages in which each sequence's are in order."""
    if in_triton(q, values):
        from lockstep.ops.cuda import attention

        assert values is not None
        if rows.planned is None:
            rows.planned = attention.Planned(rows.table, rows.starts, rows.contexts, q, keys, ordered=True)
        return attention.attend(q, keys, values, rows.planned, terms)
    return attend(q, keys, values, rows.table, rows.starts, rows.contexts, rows.tokens, terms)
