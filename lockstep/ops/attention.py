"""Causal attention over keys and values in pages: one arithmetic for training, prefill and decode.

A query row sees its keys in blocks of `BLOCK`, aligned to position 0 of its sequence, in ascending order, with the
running maximum and sum of the softmax in float32 (arXiv 2205.14135). So the bits of a row depend only on its sequence's
tokens up to it: not on the chunk it came in, its neighbors, or the pages that contain the keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import cuda, native
from lockstep.ops.attention_reference import PLAIN, Terms, attend_reference, write_pages_reference
from lockstep.ops.cache_codes import CODES, SCALES
from lockstep.ops.delta_cache import DeltaStep, paged_delta
from lockstep.ops.delta_reference import DeltaTerms
from lockstep.ops.zeros_on_demand import zeros_on_demand

PAGE = 16
"""Tokens per cache page."""
BLOCK = 64
"""Keys between two rescalings of the running softmax; part of the arithmetic, so it is fixed."""
VECTOR = 16
"""Vector lanes of the compiled kernels: head sizes are padded to a multiple of this."""


@runtime_checkable
class Attention(Protocol):
    """The attention that `Decoder.forward` calls in each layer. It maps rows to sequences, and sequences to their keys.

    v: None if the keys are also the values. terms: the layer's other attention parameters.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"] | None,
        terms: Terms = PLAIN,
    ) -> Float[Tensor, "tokens heads head_dim"]: ...

    def delta(
        self,
        layer: int,
        mixed: Float[Tensor, "tokens channels"],
        b: Float[Tensor, "tokens value_heads"],
        a: Float[Tensor, "tokens value_heads"],
        terms: DeltaTerms,
    ) -> Float[Tensor, "tokens value_heads value_dim"]:
        """What a layer computes with the delta rule instead, which replaces attention in some (`ops.delta`)."""
        ...


class KVCache:
    """The pages of every layer. Keys are transposed within a page, `[head_dim, PAGE]`, as the products read them.

    dtype: of the keys and values that are written. values: whether values are stored separately from the keys; a page
    of values is `[PAGE, head_dim]`. `head_dim` is the model's, padded by `paged_width`. format: `int8` stores the codes
    of rows that `cache_rounded` has rounded, with their scales after each page's keys; `none` stores the dtype.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        values: bool = True,
        format: str = "none",
    ):
        self.num_pages, self.dtype, self.format = num_pages, dtype, format
        width = paged_width(head_dim, torch.empty(0, dtype=dtype, device=device))
        dtype, scales = (dtype, 0) if format == "none" else (CODES, SCALES)
        # Zeroed, and only finite values are written (see `write_pages_reference`): a masked key's weight is exactly 0,
        # but 0 · NaN is NaN.
        self.keys = zeros_on_demand((num_layers, num_pages, num_kv_heads, width + scales, PAGE), dtype, device)
        self.values: Tensor | None = None
        if values:
            self.values = zeros_on_demand((num_layers, num_pages, num_kv_heads, PAGE, width), dtype, device)

    def pages(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """One layer's pages of keys, and of values if they are stored."""
        return self.keys[layer], None if self.values is None else self.values[layer]

    def tensors(self) -> list[Tensor]:
        """All layers' pages."""
        return [self.keys] if self.values is None else [self.keys, self.values]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole pages in all layers. copies: (source, target)."""
        sources, targets = torch.tensor(copies, device=self.keys.device).T
        for pages in self.tensors():
            pages.index_copy_(1, targets, pages.index_select(1, sources))

    @property
    def nbytes(self) -> int:
        return sum(pages.nbytes for pages in self.tensors())


class PagedAttention:
    """The generator's attention for one step: writes this step's keys and values into the pages, then attends.

    block_table: pages of each sequence, in order. query_lengths: rows of each sequence in this step, sequence by
    sequence; None: one each, and sequences at the end with a context of 0 are padding. context_lengths: keys of each
    sequence after this step, including its queries. Rows after them are padding: nothing is written for them and their
    output is zero. delta: where the sequences' states are, if layers have the delta rule instead.

    With one row each, the Triton forms do not synchronize with the device, so a CUDA graph can capture it.
    """

    def __init__(
        self,
        cache: KVCache,
        block_table: Int[Tensor, "sequences pages"],
        query_lengths: Int[Tensor, "sequences"] | None,
        context_lengths: Int[Tensor, "sequences"],
        delta: DeltaStep | None = None,
    ):
        self.cache, self._delta = cache, delta
        like = cache.keys.new_empty(0, dtype=cache.dtype)
        if query_lengths is None and not in_triton(like, cache.values):
            count = int((context_lengths > 0).sum())
            block_table, context_lengths = block_table[:count], context_lengths[:count]
        self._one_each = query_lengths is None
        self.table = block_table.to(torch.int32).contiguous()
        self.contexts = context_lengths.to(torch.int32).contiguous()
        if query_lengths is None:
            self.starts = torch.arange(len(self.contexts) + 1, dtype=torch.int32, device=self.contexts.device)
        else:
            self.starts = row_starts(query_lengths)
        self._planned: Any = None

    @cached_property
    def slots(self) -> Tensor:
        if not self._one_each:
            return slots_of(self.table, self.starts, self.contexts)
        position = self.contexts.long() - 1
        return self.table.gather(1, position[:, None] // PAGE)[:, 0].long() * PAGE + position % PAGE

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, terms: Terms = PLAIN) -> Tensor:
        keys, values = self.cache.pages(layer)
        if in_triton(q, v):
            from lockstep.ops.cuda.attention import Planned

            self._planned = self._planned or Planned(self.table, self.starts, self.contexts, q, k)
            return self._planned(q, k, v, keys, values, terms)[0]
        tokens = self.slots.shape[0]
        write_pages(k[:tokens], None if v is None else v[:tokens], self.slots, keys, values)
        return attend(q, keys, values, self.table, self.starts, self.contexts, tokens, terms)[0]

    def delta(self, layer: int, mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms) -> Tensor:
        assert self._delta is not None, "layers with the delta rule need its states"
        return paged_delta(mixed, b, a, terms, layer, self._delta, self.starts, self.contexts)


def row_starts(lengths: Tensor) -> Tensor:
    starts = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts


def slots_of(table: Tensor, starts: Tensor, contexts: Tensor) -> Tensor:
    """The slot of each row's key and value: page · PAGE + offset, int64."""
    lengths = (starts[1:] - starts[:-1]).long()
    sequence = torch.repeat_interleave(torch.arange(lengths.shape[0], device=table.device), lengths)
    row = torch.arange(sequence.shape[0], device=table.device)
    position = row + (contexts - starts[1:]).long()[sequence]
    return table[sequence, position // PAGE].long() * PAGE + position % PAGE


def in_triton(q: Tensor, v: Tensor | None) -> bool:
    """Whether to use Triton; its tiles are too small for the number of heads and the key width of latent attention."""
    if v is None and cuda.usable(q):
        _warn_of_latents()
        return False
    return cuda.usable(q)


@cache
def _warn_of_latents() -> None:
    warnings.warn(
        "attention whose keys are also the values has no Triton form: it uses the PyTorch form, which is several times "
        "slower and cannot be captured by engine.cuda_graphs",
        stacklevel=2,
    )


def paged_width(head_dim: int, like: Tensor) -> int:
    """A head's features in a page: padded with zeros to a multiple of `VECTOR` for the compiled kernels.

    The zeros add nothing to the scores, and the padding is removed from the output.
    """
    return -(-head_dim // VECTOR) * VECTOR if native.usable(like) else head_dim


def widened(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % VECTOR))


def narrowed(x: Tensor, head_dim: int) -> Tensor:
    return x[..., :head_dim].contiguous()


def write_pages(k: Tensor, v: Tensor | None, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
    if in_triton(k, v):
        from lockstep.ops.cuda import attention

        assert v is not None and values is not None
        return attention.write_pages(k, v, slots, keys, values)
    if not native.usable(k):
        return write_pages_reference(k, v, slots, keys, values)
    if k.shape[-1] % VECTOR:
        k, v = widened(k), None if v is None else widened(v)
    v = None if v is None else v.contiguous()
    kernel = "write_codes" if keys.dtype == CODES else "write_pages"
    native.call(kernel, k.dtype, k.contiguous(), v, slots, keys, values, *k.shape)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    table: Tensor,
    starts: Tensor,
    contexts: Tensor,
    tokens: int,
    terms: Terms,
) -> tuple[Tensor, Tensor]:
    if not native.usable(q):
        return attend_reference(q, keys, values, table, starts, contexts, BLOCK, terms)
    rows, heads, head_dim = q.shape
    if head_dim % VECTOR:
        terms = terms._replace(scale=terms.factor(head_dim))
        out, log_sums = attend(widened(q), keys, values, table, starts, contexts, tokens, terms)
        return narrowed(out, head_dim), log_sums
    out = torch.empty_like(q) if tokens == rows else torch.zeros_like(q)
    log_sums = torch.empty(rows, heads, dtype=torch.float32)
    sinks = None if terms.sinks is None else terms.sinks.float().contiguous()
    native.call(
        "attend_codes" if keys.dtype == CODES else "attend",
        q.dtype, q.contiguous(), out, log_sums, keys, values, table, starts, contexts,
        contexts.shape[0], table.shape[1], heads, keys.shape[1], head_dim, terms.factor(head_dim), terms.window, sinks,
    )  # fmt: skip
    return out, log_sums
