"""The experts of a mixture: each token uses a few of many gated feed-forwards, and their results are summed.

Rows are sorted by expert, multiplied group by group, and summed per token in the order of its choices. So a token's
bits do not depend on which, or how many, other tokens use its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from lockstep.ops import cuda, native
from lockstep.ops.activation import clamped_swiglu, silu_mul
from lockstep.ops.bias import add_grouped_bias
from lockstep.ops.formats import FORMATS, NONE
from lockstep.ops.forms import FORMS
from lockstep.ops.opaque import Operator, library

FeedForward = Callable[..., Tensor]
"""Takes rows, the start of each expert's rows, and the experts' parameters."""


def experts(
    x: Float[Tensor, "tokens dim"],
    weights: Float32[Tensor, "tokens active"],
    chosen: Int[Tensor, "tokens active"],
    gate: Float[Tensor, "experts inner dim"],
    up: Float[Tensor, "experts inner dim"],
    down: Float[Tensor, "experts dim inner"],
    shared: Callable[[Tensor], Tensor] | None = None,
    formats: tuple[str, str, str] = (NONE, NONE, NONE),
) -> Float[Tensor, "tokens dim"]:
    """The weighted sum of each token's `chosen` experts, in float32 and rounded once; see `route` for both.

    `formats`, keys of `FORMATS`, are those of the products with `gate`, `up` and `down`. `shared(x)`, the feed-forward
    of all tokens, is added. It is called here so that it can overlap with sending rows to experts on other ranks.
    """
    return mixture(partial(feed_forward, formats=formats), x, weights, chosen, (gate, up, down), shared)


def clamped_experts(
    x: Float[Tensor, "tokens dim"],
    weights: Float32[Tensor, "tokens active"],
    chosen: Int[Tensor, "tokens active"],
    gate_up: Float[Tensor, "experts 2*inner dim"],
    gate_up_bias: Float[Tensor, "experts 2*inner"],
    down: Float[Tensor, "experts dim inner"],
    down_bias: Float[Tensor, "experts dim"],
    formats: tuple[str, str] = (NONE, NONE),
) -> Float[Tensor, "tokens dim"]:
    """As `experts`, of gpt-oss: gate and up interleaved in one product's outputs, biases, the clamped activation."""
    products = partial(clamped_feed_forward, formats=formats)
    return mixture(products, x, weights, chosen, (gate_up, gate_up_bias, down, down_bias), None)


def mixture(
    feed_forward: FeedForward,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    parameters: tuple[Tensor, ...],
    shared: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """`experts` or `clamped_experts`, by its `feed_forward` and the experts' `parameters`."""
    if (form := FORMS.get(type(parameters[0]))) is not None:
        return form.mixture(feed_forward, x, weights, chosen, parameters, shared)
    starts, places, sources = order_by_expert(chosen, parameters[0].shape[0])
    out = combine(feed_forward(dispatch(x, places, sources), starts, *parameters), weights, places)
    return out if shared is None else out + shared(x)


def feed_forward(
    rows: Tensor,
    starts: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    formats: tuple[str, str, str] = (NONE, NONE, NONE),
) -> Float[Tensor, "rows dim"]:
    """Each row through its expert; the rows of expert e are `starts[e]` to `starts[e + 1]`."""
    of_gate, of_up, of_down = (FORMATS[name].grouped for name in formats)
    gated = silu_mul(of_gate(rows, gate, starts), of_up(rows, up, starts))
    return of_down(gated, down, starts)


def clamped_feed_forward(
    rows: Tensor,
    starts: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    formats: tuple[str, str] = (NONE, NONE),
) -> Float[Tensor, "rows dim"]:
    """As `feed_forward`."""
    of_gate_up, of_down = (FORMATS[name].grouped for name in formats)
    both = add_grouped_bias(of_gate_up(rows, gate_up, starts), gate_up_bias, starts)
    gated = clamped_swiglu(both[:, ::2], both[:, 1::2])
    return add_grouped_bias(of_down(gated, down, starts), down_bias, starts)


def order_by_expert(
    chosen: Int[Tensor, "tokens active"], experts: int
) -> tuple[Int[Tensor, "experts+1"], Int[Tensor, "choices"], Int[Tensor, "choices"]]:
    """Sorts choices by expert, then token: the start of each expert's rows, the row of each choice, and the choice of
    each row. All are on the device of `chosen`, without synchronizing with a GPU."""
    if torch.compiler.is_compiling():
        return _opaque_order(chosen, experts)
    return _order(chosen, experts)


def dispatch(
    x: Float[Tensor, "tokens dim"], places: Int[Tensor, "choices"], sources: Int[Tensor, "choices"]
) -> Float[Tensor, "choices dim"]:
    """The token of each row. The gradient sums a token's rows in the order of its choices."""
    if torch.compiler.is_compiling():
        return _opaque_dispatch(x, places, sources)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Dispatch.apply(x, places, sources)
    return _dispatch(x, places, sources)


def combine(
    rows: Float[Tensor, "choices dim"], weights: Float32[Tensor, "tokens active"], places: Int[Tensor, "choices"]
) -> Float[Tensor, "tokens dim"]:
    """The weighted sum of each token's rows, in the order of its choices, in float32 and rounded once."""
    return _weighted_sum(rows, weights, places)


def _order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = chosen.flatten().contiguous()  # with one choice per token, flattening may keep the strides
    if native.is_pretending() or flat.is_meta:
        starts = torch.arange(experts + 1) * len(flat) // experts
        return starts, torch.empty_like(flat), torch.empty_like(flat)
    if flat.device.type == "cpu" and native.library() is not None:
        starts, places, sources = flat.new_empty(experts + 1), torch.empty_like(flat), torch.empty_like(flat)
        native.call("order_by_expert", torch.float32, flat, starts, places, sources, len(flat), experts)
        return starts, places, sources
    sources = flat.argsort(stable=True)
    places = torch.empty_like(sources).scatter_(0, sources, torch.arange(len(sources), device=sources.device))
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat + 1, torch.ones_like(flat)).cumsum(0), places, sources


def _dispatch(x: Tensor, places: Tensor, sources: Tensor) -> Tensor:
    active = max(len(sources) // max(len(x), 1), 1)
    if native.is_pretending() or x.is_meta:
        return x.new_empty(len(sources), x.shape[1])
    if not native.usable(x):
        return x[sources // active]
    out = x.new_empty(len(sources), x.shape[1])
    native.call("dispatch", x.dtype, x.contiguous(), sources, out, len(sources), active, x.shape[1])
    return out


def _triton() -> Any:
    from lockstep.ops.cuda import experts

    return experts


def _combine(rows: Tensor, weights: Tensor | None, places: Tensor, tokens: int = 0) -> Tensor:
    tokens = tokens if weights is None else len(weights)
    out = rows.new_empty(tokens, rows.shape[1])
    active = len(places) // max(tokens, 1)
    if native.usable(rows):
        weights = None if weights is None else weights.contiguous()
        native.call("combine", rows.dtype, rows.contiguous(), weights, places, out, tokens, active, rows.shape[1])
        return out
    if cuda.usable(rows):
        _triton().combine(rows.contiguous(), None if weights is None else weights.contiguous(), places, out)
        return out
    by_choice = rows[places].unflatten(0, (tokens, active)).float()
    total = torch.zeros(tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    for choice in range(active):
        row = by_choice[:, choice]
        total = total + (row if weights is None else weights[:, choice, None] * row)
    return total.to(rows.dtype)


def _combine_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor, Tensor]:
    if native.usable(rows) or cuda.usable(rows):
        grad_rows, grad_weights = rows.new_empty(rows.shape), weights.new_empty(weights.shape)
        tensors = (grad.contiguous(), rows.contiguous(), weights.contiguous(), places, grad_rows, grad_weights)
        if cuda.usable(rows):
            _triton().combine_backward(*tensors)
        else:
            native.call("combine_backward", rows.dtype, *tensors, *weights.shape, rows.shape[1])
        return grad_rows, grad_weights
    wide = grad.float()[:, None]
    by_choice = rows[places].unflatten(0, weights.shape)
    grad_rows = torch.empty_like(rows)
    grad_rows[places] = (wide * weights[..., None]).flatten(0, 1).to(rows.dtype)
    return grad_rows, (wide * by_choice.float()).sum(-1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, sources: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.tokens = len(x)
        return _dispatch(x, places, sources)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _combine(grads[0], None, places, ctx.tokens), None, None


@library.operator(
    "order_by_expert(Tensor chosen, int experts) -> (Tensor, Tensor, Tensor)",
    fake=lambda chosen, experts: (
        chosen.new_empty(experts + 1),
        chosen.new_empty(chosen.numel()),
        chosen.new_empty(chosen.numel()),
    ),
)
def _opaque_order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return _order(chosen, experts)


@library.operator(
    "dispatch(Tensor x, Tensor places, Tensor sources) -> Tensor",
    fake=lambda x, places, sources: x.new_empty(sources.shape[0], x.shape[1]),
)
def _opaque_dispatch(x: Tensor, places: Tensor, sources: Tensor) -> Tensor:
    return _dispatch(x, places, sources)


_weighted_sum = Operator(
    "combine(Tensor rows, Tensor weights, Tensor places) -> Tensor",
    _combine,
    fake=lambda rows, weights, places: rows.new_empty(weights.shape[0], rows.shape[1]),
    gradients=_combine_gradients,
)


@library.operator(
    "combine_evenly(Tensor rows, Tensor places, SymInt tokens) -> Tensor",
    fake=lambda rows, places, tokens: rows.new_empty(tokens, rows.shape[1]),
)
def _opaque_sum(rows: Tensor, places: Tensor, tokens: int) -> Tensor:
    return _combine(rows, None, places, tokens)


def _save_dispatch(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.tokens = inputs[0].shape[0]


library.differentiable(
    "dispatch", _save_dispatch, lambda ctx, grad: (_opaque_sum(grad, *ctx.saved_tensors, ctx.tokens), None, None)
)
