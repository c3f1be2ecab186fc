"""Paged attention of a decode step when only the shapes are known in advance."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lockstep.ops.attention import KVCache, PagedAttention, in_triton
from lockstep.ops.attention_reference import PLAIN, Terms


class DecodeAttention:
    """`PagedAttention` with one query per sequence. Rows at the end with a context of 0 are padding.

    The Triton forms do not synchronize with the device, so a CUDA graph can capture it.
    """

    def __init__(
        self,
        cache: KVCache,
        block_table: Int[Tensor, "sequences pages"],
        context_lengths: Int[Tensor, "sequences"],
    ):
        self.cache = cache
        self.table = block_table
        self.contexts = context_lengths
        self._planned: Any = None

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        terms: Terms = PLAIN,
    ) -> Tensor:
        if self._planned is None:
            self._planned = self._plan(q, k, v)
        if isinstance(self._planned, PagedAttention):
            return self._planned(layer, q, k, v, terms)
        return self._planned(q, k, v, *self.cache.pages(layer), terms)[0]

    def _plan(self, q: Tensor, k: Tensor, v: Tensor | None) -> Any:
        if in_triton(q, v):
            from lockstep.ops.cuda.attention import Planned

            starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
            return Planned(self.table, starts, self.contexts, q, k)
        count = int((self.contexts > 0).sum())
        contexts = self.contexts[:count]
        return PagedAttention(self.cache, self.table[:count], torch.ones_like(contexts), contexts)
