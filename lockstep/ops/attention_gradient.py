"""The gradient of packed attention, recomputed block by block from the saved log-sums: no T×T matrix is stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import native
from lockstep.ops.attention import VECTOR, in_triton, narrowed, widened
from lockstep.ops.attention_reference import PLAIN, Terms, attend_backward_reference
from lockstep.ops.saved_outputs import saved_output

Gradients = tuple[Tensor, Tensor, Tensor | None]
"""Of queries, keys and values. Values that are the keys have None: the gradient of the keys includes both."""


class Attended(NamedTuple):
    """What a backward pass reads of a forward pass."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    out: Tensor
    """The attended values, shaped as `q`."""
    log_sums: Tensor
    """The log of each row's sum of weights `[rows, heads]`."""


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
        *tensors, sinks = ctx.saved_tensors
        attended = Attended(*tensors)
        gradients = ctx.attention.backward(grads[0], attended, ctx.terms)
        of_sinks = None
        if sinks is not None:
            of_sinks = sink_gradient(grads[0], attended.out, attended.log_sums, sinks, ctx.attention.tokens)
        return *gradients, of_sinks, None, None


def attend_backward(
    grad_out: Tensor,
    attended: Attended,
    starts: Tensor,
    pieces: tuple[Tensor, Tensor] | None = None,
    terms: Terms = PLAIN,
) -> Gradients:
    """Gradients of queries, keys and values; the query rows of each sequence begin at one of `starts`.

    With `pieces`, (contexts, first_keys), the rows from `starts[i]` to `starts[i + 1]` are the queries of the last of
    `contexts[i]` keys, which start at row `first_keys[i]` of the keys, both in ascending order. The gradients of keys
    and values are then float32, since those of other pieces will be added. Sinks only enter through the attended values
    and log-sums.
    """
    q, k, v, out, log_sums = attended
    dtype, triton = k.dtype if pieces is None else torch.float32, in_triton(q, v)
    inputs = (grad_out, q, k, k if v is None else v, out, log_sums, starts, pieces, terms)
    grad_q, grad_k, grad_v = _gradients(*inputs, torch.float32 if v is None else dtype, triton)
    return (grad_q, grad_k, grad_v) if v is not None else (grad_q, grad_k.add_(grad_v).to(dtype), None)


# More than eight parameters: each tensor that the forward saved, and the form that computes them.
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
        grad_out, q, k, v, out = (widened(x) for x in (grad_out, q, k, v, out))
        terms = terms._replace(scale=terms.factor(head_dim))
        grads = _gradients(grad_out, q, k, v, out, log_sums, starts, pieces, terms, dtype, triton)
        return narrowed(grads[0], head_dim), narrowed(grads[1], head_dim), narrowed(grads[2], head_dim)
    grad_q = torch.zeros(q.shape, dtype=torch.float32)
    grad_k, grad_v = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    native.call(
        "attend_backward" if dtype == q.dtype else "attend_backward_wide", q.dtype, grad_out.contiguous(),
        q.contiguous(), k.contiguous(), v.contiguous(), out, log_sums, grad_q, grad_k, grad_v, starts, contexts,
        first_keys, contexts.shape[0], heads, k.shape[1], head_dim, terms.factor(head_dim), terms.window,
    )  # fmt: skip
    return grad_q.to(q.dtype), grad_k, grad_v


def sink_gradient(
    grad_out: Float[Tensor, "rows heads head_dim"],
    out: Float[Tensor, "rows heads head_dim"],
    log_sums: Float[Tensor, "rows heads"],
    sinks: Float[Tensor, "heads"],
    tokens: int,
) -> Float[Tensor, "heads"]:
    """The gradient of attention sinks, in their dtype, given the attended values and log-sums that include them.

    A sink's weight is w = e^(sink - log-sum), and the derivative of the output with respect to it is -w times the
    output. Rows from `tokens` on are padding, whose log-sums are undefined.
    """
    grad_out, out, log_sums = grad_out[:tokens], out[:tokens], log_sums[:tokens]
    if native.usable(out):
        grad = torch.zeros(sinks.shape, dtype=torch.float32)
        native.call(
            "sink_gradient", out.dtype, grad_out.contiguous(), out.contiguous(), log_sums.contiguous(),
            sinks.float().contiguous(), grad, *out.shape,
        )  # fmt: skip
        return grad.to(sinks.dtype)
    deltas = (grad_out.float() * out.float()).sum(-1)
    return -(torch.exp(sinks.float() - log_sums) * deltas).sum(0).to(sinks.dtype)
