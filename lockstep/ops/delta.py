"""Gated delta networks over packed sequences: the trainer's form (arXiv 2412.06464).

A sequence is in chunks of `CHUNK` tokens, aligned to its position 0. A row's output is a fixed ascending chain over the
state at its chunk's beginning and the chunk's rows up to it. So its bits depend only on its sequence's tokens up to it,
as in attention: a decode step (`delta_cache`) computes the chunk's next row.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import cuda, native
from lockstep.ops.delta_reference import CHUNK, DeltaTerms, differentiable, sequence_reference
from lockstep.ops.saved_outputs import saved_output

DeltaGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of the mixed rows, of b and a, and of the terms' convolution, rates and step bias."""


def delta(
    mixed: Float[Tensor, "rows channels"],
    b: Float[Tensor, "rows value_heads"],
    a: Float[Tensor, "rows value_heads"],
    terms: DeltaTerms,
    starts: Int[Tensor, "sequences+1"],
) -> Float[Tensor, "rows value_heads value_dim"]:
    """The outputs of whole sequences, which begin at `starts`, int32, whose last element is the number of their rows;
    rows after them are padding, with outputs of zero.

    mixed: what the convolution reads: queries, keys and values. b: its sigmoid is the strength of a row's update. a: a
    row multiplies the state by e^(-e^log_rates · softplus(a + step_bias)).
    """
    inputs = (mixed, b, a, terms.conv, terms.log_rates, terms.step_bias)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        out: Tensor = _Delta.apply(*inputs, terms.key_heads, terms.key_dim, starts)
        return out
    return _forward(mixed, b, a, terms, starts, for_gradient=False)[0]


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, key_heads, key_dim, starts = arguments
        mixed, b, a, *weights = inputs
        terms = DeltaTerms(weights[0], weights[1], weights[2], key_heads, key_dim)
        out, states = saved_output("attention", lambda: _forward(mixed, b, a, terms, starts))
        ctx.save_for_backward(*inputs, starts, states)
        ctx.sizes = key_heads, key_dim
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, b, a, conv, rates, bias, starts, states = ctx.saved_tensors
        terms = DeltaTerms(conv, rates, bias, *ctx.sizes)
        return *_gradients(grads[0], mixed, b, a, terms, starts, states), None, None, None


def _forward(
    mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, starts: Tensor, for_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """The outputs, and the states that the backward pass reads."""
    if cuda.usable(mixed):
        from lockstep.ops.cuda import delta as kernels

        return kernels.packed(mixed, b, a, terms, starts)
    if has_kernels(mixed, b, a, terms):
        return _native_forward(mixed, b, a, terms, starts, for_gradient)
    out = mixed.new_zeros(len(mixed), terms.value_heads, terms.value_dim)
    for start, stop in _spans(starts):
        out[start:stop] = sequence_reference(mixed[start:stop], b[start:stop], a[start:stop], terms)
    return out, mixed.new_empty(0)


def _gradients(
    grad_out: Tensor, mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, starts: Tensor, states: Tensor
) -> DeltaGradients:
    """All gradients, in their tensors' dtypes. Those of a key head and its value heads do not depend on other heads,
    which may be on other ranks."""
    if cuda.usable(mixed):
        from lockstep.ops.cuda import delta_backward as kernels

        return kernels.packed_backward(grad_out, mixed, b, a, terms, starts, states)
    if has_kernels(mixed, b, a, terms):
        return _native_gradients(grad_out, mixed, b, a, terms, starts, states)
    sizes, per_key = (terms.key_heads, terms.key_dim), terms.value_heads // terms.key_heads
    rows, weights = (mixed, b, a), (terms.conv, terms.log_rates, terms.step_bias)
    of_rows, of_weights = [torch.zeros_like(x) for x in rows], [torch.zeros_like(x).float() for x in weights]
    for (start, stop), head in product(_spans(starts), range(terms.key_heads)):
        heads, values = slice(head, head + 1), slice(head * per_key, (head + 1) * per_key)
        with torch.enable_grad():
            inputs = [x[start:stop].detach().requires_grad_() for x in rows]
            inputs += [x.detach().float().requires_grad_() for x in weights]
            whole = DeltaTerms(*inputs[3:], *sizes)  # type: ignore[call-arg, arg-type]
            own = whole.rows_of_heads(inputs[0], inputs[1], inputs[2], heads)
            out = differentiable(*own, whole.of_heads(heads))
            grads = torch.autograd.grad(out, inputs, grad_out[start:stop, values].contiguous())
        for total, grad in zip(of_rows, grads[:3]):
            total[start:stop] += grad
        for total, grad in zip(of_weights, grads[3:]):
            total += grad
    conv, rates, bias = (total.to(x.dtype) for total, x in zip(of_weights, weights))
    return of_rows[0], of_rows[1], of_rows[2], conv, rates, bias


def has_kernels(mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms) -> bool:
    """Whether the compiled kernels take these tensors: of one dtype, on the CPU."""
    tensors = (mixed, b, a, terms.conv, terms.log_rates, terms.step_bias)
    return native.usable(mixed) and all(x.dtype == mixed.dtype for x in tensors)


def kernel_inputs(mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms) -> tuple[Tensor, ...]:
    """The first arguments of all kernels."""
    tensors = (mixed, b, a, terms.conv, terms.log_rates, terms.step_bias)
    return tuple(x.contiguous() for x in tensors)


def kernel_sizes(terms: DeltaTerms) -> tuple[int, ...]:
    return terms.key_heads, terms.value_heads, terms.key_dim, terms.value_dim, terms.conv.shape[1]


def _native_forward(
    mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, starts: Tensor, for_gradient: bool
) -> tuple[Tensor, Tensor]:
    """With a gradient, the states at the boundaries inside of sequences: number k of a sequence, from 0 on, is at its
    first row // CHUNK + k."""
    out = mixed.new_empty(len(mixed), terms.value_heads, terms.value_dim)
    states = torch.empty(0)
    if for_gradient:
        states = torch.empty(len(mixed) // CHUNK, terms.value_heads, terms.key_dim, terms.value_dim)
    inputs, sizes = kernel_inputs(mixed, b, a, terms), kernel_sizes(terms)
    saved = states if for_gradient else None
    native.call("delta", mixed.dtype, *inputs, out, saved, starts, len(starts) - 1, len(mixed), *sizes)
    return out, states


def _native_gradients(
    grad_out: Tensor, mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, starts: Tensor, states: Tensor
) -> DeltaGradients:
    inputs, sizes = kernel_inputs(mixed, b, a, terms), kernel_sizes(terms)
    of_rows = [torch.empty_like(x) for x in inputs[:3]]
    of_weights = [torch.empty_like(x, dtype=torch.float32) for x in inputs[3:]]
    native.call(
        "delta_backward", mixed.dtype, grad_out.contiguous(), *inputs, states, *of_rows, *of_weights, starts,
        len(starts) - 1, len(mixed), *sizes,
    )  # fmt: skip
    conv, rates, bias = (grad.to(x.dtype) for grad, x in zip(of_weights, inputs[3:]))
    return of_rows[0], of_rows[1], of_rows[2], conv, rates, bias


def _spans(starts: Tensor) -> list[tuple[int, int]]:
    ends: list[int] = starts.tolist()
    return [span for span in zip(ends, ends[1:]) if span[1] > span[0]]
