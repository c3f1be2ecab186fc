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
from lockstep.ops.attention_reference import (
    PLAIN,
    Terms,
    attend_backward_reference,
    attend_reference,
    write_pages_reference,
)
from lockstep.ops.on_demand import zeros_on_demand
from lockstep.ops.saved_outputs import saved_output
from lockstep.ops.sinks import sink_gradient

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


class KVCache:
    """The pages of every layer. Keys are transposed within a page, `[head_dim, PAGE]`, as the products read them.

    values: whether values are stored separately from the keys; a page of values is `[PAGE, head_dim]`. `head_dim` is
    the model's, padded by `paged_width`.
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
    ):
        self.num_pages = num_pages
        width = paged_width(head_dim, torch.empty(0, dtype=dtype, device=device))
        # Zeroed, and only finite values are written (see `write_pages_reference`): a masked key's weight is exactly 0,
        # but 0 · NaN is NaN.
        self.keys = zeros_on_demand((num_layers, num_pages, num_kv_heads, width, PAGE), dtype, device)
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
    sequence; None: one each. context_lengths: keys of each sequence after this step, including its queries. Rows after
    them are padding: nothing is written for them and their output is zero.
    """

    def __init__(
        self,
        cache: KVCache,
        block_table: Int[Tensor, "sequences pages"],
        query_lengths: Int[Tensor, "sequences"] | None,
        context_lengths: Int[Tensor, "sequences"],
    ):
        self.cache = cache
        self._one_each = query_lengths is None
        self.table = block_table.to(torch.int32).contiguous()
        self.contexts = context_lengths.to(torch.int32).contiguous()
        if query_lengths is None:
            self.starts = torch.arange(len(self.contexts) + 1, dtype=torch.int32, device=self.contexts.device)
        else:
            self.starts = _starts(query_lengths)
        self._planned: Any = None

    @cached_property
    def slots(self) -> Tensor:
        if not self._one_each:
            return _slots(self.table, self.starts, self.contexts)
        position = self.contexts.long() - 1
        return self.table.gather(1, position[:, None] // PAGE)[:, 0].long() * PAGE + position % PAGE

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        terms: Terms = PLAIN,
    ) -> Tensor:
        keys, values = self.cache.pages(layer)
        if in_triton(q, v):
            from lockstep.ops.cuda.attention import Planned

            self._planned = self._planned or Planned(self.table, self.starts, self.contexts, q, k)
            return self._planned(q, k, v, keys, values, terms)[0]
        tokens = self.slots.shape[0]
        _write_pages(k[:tokens], None if v is None else v[:tokens], self.slots, keys, values)
        return _attend(q, keys, values, self.table, self.starts, self.contexts, tokens, terms)[0]


class PackedAttention:
    """The trainer's attention: packed complete sequences, with a gradient. Rows after them are padding."""

    row_counts: Int[Tensor, "tokens"] | None = None
    """How often each row counts in the experts' load (`counted_rows`); None: once."""

    def __init__(self, lengths: list[int], device: str | torch.device = "cpu"):
        self.contexts = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.starts = _starts(self.contexts)
        pages = (self.contexts + PAGE - 1) // PAGE
        ends = pages.cumsum(0)
        self.num_pages = int(ends[-1]) if lengths else 0
        # Every sequence has separate pages, in order; a shorter sequence's table row continues into other pages, whose
        # keys are masked.
        columns = torch.arange(int(pages.max()) if lengths else 0, device=device)
        self.table = ((ends - pages)[:, None] + columns).clamp(max=self.num_pages - 1).to(torch.int32)
        self.slots = _slots(self.table, self.starts, self.contexts)
        self.tokens: int = self.slots.shape[0]
        """Rows of all sequences, without padding."""
        self._ends = ends - pages, pages
        self._planned: Any = None

    @cached_property
    def page_rows(self) -> tuple[Int[Tensor, "pages"], Int[Tensor, "pages"]]:
        """Each page's first row of keys, and the end of its sequence's rows, int32."""
        first_pages, pages = self._ends
        sequence = torch.repeat_interleave(pages, output_size=self.num_pages)
        inside = torch.arange(self.num_pages, device=pages.device) - first_pages[sequence]
        return (self.starts[sequence] + inside * PAGE).to(torch.int32), self.starts[sequence + 1]

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        terms: Terms = PLAIN,
    ) -> Tensor:
        return attend_or_train(self, q, k, v, terms)

    def forward(self, q: Tensor, k: Tensor, v: Tensor | None, terms: Terms = PLAIN) -> tuple[Tensor, Tensor]:
        """The attended values and, for the gradient, the log of each row's sum of weights `[tokens, heads]`."""
        keys, values = self.pages(k, v)
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
        """Gradients of `q`, `k` and `v`, in their dtype."""
        return attend_backward(grad_out, q, k, v, out, log_sums, self.starts, terms=terms)

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
        _write_pages(k[:tokens], None if v is None else v[:tokens], self.slots, keys, values)
        return keys, values


def attend_or_train(attention: Any, q: Tensor, k: Tensor, v: Tensor | None, terms: Terms) -> Tensor:
    """Attention by an object with `forward`, `backward` and `tokens`; with a gradient if one is needed."""
    inputs = (q, k, v, terms.sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return TrainedAttention.apply(q, k, v, terms.sinks, attention, terms._replace(sinks=None))
    out: Tensor = attention.forward(q, k, v, terms)[0]
    return out


class TrainedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None, attention: Any, terms: Terms
    ) -> Tensor:
        out, log_sums = saved_output("attention", lambda: attention.forward(q, k, v, terms._replace(sinks=sinks)))
        ctx.save_for_backward(q, k, v, out, log_sums, sinks)
        ctx.attention, ctx.terms = attention, terms
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None, None]:
        q, k, v, out, log_sums, sinks = ctx.saved_tensors
        gradients = ctx.attention.backward(grads[0], q, k, v, out, log_sums, ctx.terms)
        of_sinks = None
        if sinks is not None:
            of_sinks = sink_gradient(grads[0], out, log_sums, sinks, ctx.attention.tokens)
        return *gradients, of_sinks, None, None


Gradients = tuple[Tensor, Tensor, Tensor | None]
"""Of queries, keys and values. Values that are the keys have None: the gradient of the keys includes both."""


# More than eight parameters: each tensor that the forward saved.
def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    pieces: tuple[Tensor, Tensor] | None = None,
    terms: Terms = PLAIN,
) -> Gradients:
    """Gradients of `q`, `k` and `v`; the query rows of each sequence begin at one of `starts`.

    With `pieces`, (contexts, first_keys), the rows from `starts[i]` to `starts[i + 1]` are the queries of the last of
    `contexts[i]` keys, which start at row `first_keys[i]` of `k`, both in ascending order. The gradients of `k` and `v`
    are then float32, since those of other pieces will be added. Sinks only enter through `out` and `log_sums`.
    """
    dtype = k.dtype if pieces is None else torch.float32
    if v is None:
        inputs = (grad_out, q, k, k, out, log_sums, starts, pieces, terms)
        grad_q, grad_k, grad_v = _gradients(*inputs, torch.float32, in_triton(q, v))
        return grad_q, grad_k.add_(grad_v).to(dtype), None
    inputs = (grad_out, q, k, v, out, log_sums, starts, pieces, terms)
    return _gradients(*inputs, dtype, in_triton(q, v))


# More than eight parameters: those of `attend_backward`, and the form that computes them.
def _gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    pieces: tuple[Tensor, Tensor] | None,
    terms: Terms,
    dtype: torch.dtype,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `q`, in its dtype, and of `k` and `v` in `dtype`."""
    if triton:
        from lockstep.ops.cuda import attention_backward

        return attention_backward.attend_backward(grad_out, q, k, v, out, log_sums, starts, pieces, dtype, terms)
    contexts, first_keys = pieces or (starts.diff(), starts[:-1])
    if not native.usable(q):
        grad_q, grad_k, grad_v = attend_backward_reference(
            grad_out, q, k, v, out, log_sums, starts, contexts, first_keys, terms
        )
        return grad_q, grad_k.to(dtype), grad_v.to(dtype)
    heads, head_dim = q.shape[1:]
    if head_dim % VECTOR:
        grad_out, q, k, v, out = (_widened(x) for x in (grad_out, q, k, v, out))
        terms = terms._replace(scale=terms.factor(head_dim))
        grads = _gradients(grad_out, q, k, v, out, log_sums, starts, pieces, terms, dtype, triton)
        return _narrowed(grads[0], head_dim), _narrowed(grads[1], head_dim), _narrowed(grads[2], head_dim)
    grad_q = torch.zeros(q.shape, dtype=torch.float32)
    grad_k, grad_v = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    native.call(
        "attend_backward" if dtype == q.dtype else "attend_backward_wide", q.dtype, grad_out.contiguous(),
        q.contiguous(), k.contiguous(), v.contiguous(), out, log_sums, grad_q, grad_k, grad_v, starts, contexts,
        first_keys, contexts.shape[0], heads, k.shape[1], head_dim, terms.factor(head_dim), terms.window,
    )  # fmt: skip
    return grad_q.to(q.dtype), grad_k, grad_v


def _starts(lengths: Tensor) -> Tensor:
    starts = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts


def _slots(table: Tensor, starts: Tensor, contexts: Tensor) -> Tensor:
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


def _widened(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % VECTOR))


def _narrowed(x: Tensor, head_dim: int) -> Tensor:
    return x[..., :head_dim].contiguous()


def _write_pages(k: Tensor, v: Tensor | None, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
    if in_triton(k, v):
        from lockstep.ops.cuda.attention import write_pages

        assert v is not None and values is not None
        return write_pages(k, v, slots, keys, values)
    if not native.usable(k):
        return write_pages_reference(k, v, slots, keys, values)
    if k.shape[-1] % VECTOR:
        k, v = _widened(k), None if v is None else _widened(v)
    v = None if v is None else v.contiguous()
    native.call("write_pages", k.dtype, k.contiguous(), v, slots, keys, values, *k.shape)


def _attend(
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
        out, log_sums = _attend(_widened(q), keys, values, table, starts, contexts, tokens, terms)
        return _narrowed(out, head_dim), log_sums
    out = torch.empty_like(q) if tokens == rows else torch.zeros_like(q)
    log_sums = torch.empty(rows, heads, dtype=torch.float32)
    sinks = None if terms.sinks is None else terms.sinks.float().contiguous()
    native.call(
        "attend", q.dtype, q.contiguous(), out, log_sums, keys, values, table, starts, contexts,
        contexts.shape[0], table.shape[1], heads, keys.shape[1], head_dim, terms.factor(head_dim), terms.window, sinks,
    )  # fmt: skip
    return out, log_sums
