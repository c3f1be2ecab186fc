"""Routing: each token's experts and their weights, in float32 from the logits on, each token independently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from lockstep.ops import native, one_order, plain
from lockstep.ops.expert_load import ExpertLoad, key_of, load_of
from lockstep.ops.forms import FORMS
from lockstep.ops.linear import input_gradient, product_sums, token_weight_gradient, weight_gradient
from lockstep.ops.opaque import Operator, library
from lockstep.ops.routes import replay_and_record
from lockstep.ops.saved_outputs import saved_output

Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]
SCORINGS: tuple[Scoring, ...] = get_args(Scoring)


@dataclass(frozen=True)
class Routing:
    """How experts are chosen from their logits, and weighted."""

    active: int
    """Experts per token."""
    scoring: Scoring = "softmax_of_chosen"
    """`softmax`: over all experts, before the choice; `softmax_of_chosen`: over the chosen ones, which equals the
    softmax over all, divided by its sum over the chosen; `sigmoid`: per expert (arXiv 2412.19437)."""
    normalize: bool = True
    """Whether sigmoid scores are divided by their sum over the chosen experts."""
    scale: float = 1.0
    """Final factor of the weights."""
    groups: int = 1
    """Groups of experts; the `groups_kept` groups whose two best scores have the highest sum can be chosen from."""
    groups_kept: int = 1


def router_logits(
    x: Float[Tensor, "tokens dim"], weight: Float[Tensor, "experts dim"]
) -> Float32[Tensor, "tokens experts"]:
    """`x @ weight.T` with float32 sums that are not rounded to the factors' dtype; row-invariant like `linear`."""
    if (form := FORMS.get(type(weight))) is not None:
        return form.router_logits(x, weight)
    return _router_logits(x, weight)


def route(
    logits: Float32[Tensor, "tokens experts"],
    routing: Routing,
    bias: Float32[Tensor, "experts"] | None = None,
    load: ExpertLoad | None = None,
) -> tuple[Float32[Tensor, "tokens active"], Int[Tensor, "tokens active"]]:
    """The weights of each token's experts, highest score first, and their indices (int64).

    `load` counts the choices in the backward pass, and adds penalties to the gradient; see `counted_rows`. `bias` is
    added to sigmoid scores only for the choice, and has no gradient: it balances the load (arXiv 2408.15664). Of equal
    scores, the expert with the lower index comes first.
    """
    if (form := FORMS.get(type(bias))) is not None:
        return form.route(logits, routing, bias, load)
    if torch.compiler.is_compiling():
        return _opaque_route(logits, bias, key_of(load), *_numbers(routing))[:2]
    if torch.is_grad_enabled() and logits.requires_grad:
        return _Route.apply(logits, bias, load, None if load is None else load.counts_of(len(logits)), routing)
    return _route(logits, bias, routing)


def _numbers(routing: Routing) -> tuple[int, int, int, float, int, int]:
    """As kernels and opaque operators take them."""
    scoring, normalize = SCORINGS.index(routing.scoring), int(routing.normalize)
    return routing.active, scoring, normalize, float(routing.scale), routing.groups, routing.groups_kept


def _routing(active: int, scoring: int, normalize: int, scale: float, groups: int, kept: int) -> Routing:
    """The inverse of `_numbers`."""
    return Routing(active, SCORINGS[scoring], bool(normalize), scale, groups, kept)


def logits_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    needed: tuple[bool, bool] = (True, True),
    gathered: one_order.GatheredRows | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """In float32, like the logits, and rounded once. With one order, if other ranks have some of the rows, the first
    rank computes the weight's."""
    grad_x = input_gradient(grad, weight.float()).to(x.dtype) if needed[0] else None
    if not needed[1]:
        return grad_x, None
    if gathered is None or not one_order.is_required():
        return grad_x, token_weight_gradient(grad, x.float()).to(weight.dtype)
    grad, x = gathered.gather(grad), gathered.gather(x)
    return grad_x, weight_gradient(grad, x.float()).to(weight.dtype) if gathered.is_first else torch.zeros_like(weight)


def _route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    routes = _choose(logits, bias, routing)
    return replay_and_record(logits, *routes, lambda chosen: _weigh(logits, chosen, routing))


def _choose(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    if logits.is_meta or not native.usable(logits):
        return _route_plainly(logits, bias, routing)
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, routing.active)
    chosen = torch.empty(tokens, routing.active, dtype=torch.int64)
    if native.is_pretending():
        chosen.copy_(torch.arange(tokens * routing.active).view(tokens, -1) % experts)
    sizes = tokens, experts, *_numbers(routing)
    native.call("route", torch.float32, logits.contiguous(), bias, weights, chosen, *sizes)
    return weights, chosen


def _route_plainly(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Sums over a row are chains in ascending order, element by element (`plain`)."""
    sigmoid = routing.scoring == "sigmoid"
    scores = 1 / (1 + plain.exp(-logits)) if sigmoid else logits
    choices = scores if bias is None or not sigmoid else scores + bias
    choices = choices.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if routing.groups > 1:
        by_group = choices.unflatten(1, (routing.groups, -1))
        worth = _chain(_descending(by_group)[0][..., :2])
        best = _descending(worth)[1][:, : routing.groups_kept]
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter(1, best, True)
        choices = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    chosen = _descending(choices)[1][:, : routing.active]
    return _weigh(logits, chosen, routing), chosen


def _weigh(logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
    """The weights of a token's `chosen` experts, as `_route_plainly` sums."""
    scores, scale = logits.gather(1, chosen), float(routing.scale)
    if routing.scoring == "sigmoid":
        scores = 1 / (1 + plain.exp(-scores))
        return (scores / _chain(scores)[:, None] if routing.normalize else scores) * scale
    weights = plain.exp(scores - scores[:, :1])
    over_all = routing.scoring == "softmax"
    total = plain.row_sum(plain.exp(logits - scores[:, :1])) if over_all else _chain(weights)
    return weights / total[:, None] * scale


def _descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values in descending order and their positions; ties keep their order."""
    values, places = torch.sort(x, dim=-1, descending=True, stable=True)
    return values, places


def _chain(x: Tensor) -> Tensor:
    """The sum over the last, short dimension, in ascending order."""
    total = x[..., 0]
    for index in range(1, x.shape[-1]):
        total = total + x[..., index]
    return total


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, load: ExpertLoad | None, counts: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        weights, chosen = saved_output("route", lambda: _route(logits, bias, routing))
        ctx.save_for_backward(logits, weights, chosen, counts)
        ctx.load, ctx.routing = load, routing
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, weights, chosen, counts = ctx.saved_tensors
        gradient = _route_gradient(grads[0], logits, weights, chosen, counts, ctx.load, ctx.routing)
        return gradient, None, None, None, None


def _route_gradient(
    grad: Tensor,
    logits: Tensor,
    weights: Tensor,
    chosen: Tensor,
    counts: Any,
    load: ExpertLoad | None,
    routing: Routing,
) -> Tensor:
    """The gradient of the logits, with the penalties of `load`, which counts the choices."""
    gradient = _weights_gradient(grad, logits, weights, chosen, routing)
    if load is None or native.is_pretending():  # the choices have no values
        return gradient
    load.count(chosen, counts)
    penalty = load.penalty(logits, counts)
    return gradient if penalty is None else gradient + penalty


def _weights_gradient(grad: Tensor, logits: Tensor, weights: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
    """The derivatives of `_weigh`; sums over a token's experts are chains in the order of its choices."""
    scale = float(routing.scale)
    shares = weights / scale
    along = _chain(grad * shares)[:, None]
    if routing.scoring == "sigmoid":
        scores = 1 / (1 + plain.exp(-logits.gather(1, chosen)))
        slope = scores * (1 - scores)
        slope = slope * ((grad - along) / _chain(scores)[:, None]) if routing.normalize else slope * grad
        return torch.zeros_like(logits).scatter(1, chosen, slope * scale)
    of_chosen = shares * (grad - along) * scale
    if routing.scoring == "softmax_of_chosen":
        return torch.zeros_like(logits).scatter(1, chosen, of_chosen)
    # The softmax over all experts, from the probability of the first chosen one.
    probabilities = plain.exp(logits - logits.gather(1, chosen[:, :1])) * shares[:, :1]
    return (probabilities * (-along * scale)).scatter(1, chosen, of_chosen)


_router_logits = Operator(
    "router_logits(Tensor x, Tensor weight) -> Tensor",
    product_sums,
    fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32),
    gradients=logits_gradients,
    kind="linear",
)


@library.operator(
    "route(Tensor logits, Tensor? bias, Tensor load, int active, int scoring, int normalize, float scale, int groups, "
    "int kept) -> (Tensor, Tensor, Tensor)",
    fake=lambda logits, bias, load, active, *settings: (
        logits.new_empty(logits.shape[0], active),
        logits.new_empty(logits.shape[0], active, dtype=torch.int64),
        logits.new_empty(logits.shape[0], dtype=torch.int64),
    ),
)
def _opaque_route(logits: Tensor, bias: Tensor | None, load: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The third result is how often each row counts, for the gradient."""
    expert_load = load_of(load)
    counts = None if expert_load is None else expert_load.counts_of(len(logits))
    # Always a copy: compiled code may overwrite tensors that it no longer needs.
    counts = torch.ones(len(logits), dtype=torch.int64, device=logits.device) if counts is None else counts.clone()
    return *_route(logits, bias, _routing(*settings)), counts


@library.operator(
    "route_gradient(Tensor grad, Tensor logits, Tensor weights, Tensor chosen, Tensor counts, Tensor load, int active, "
    "int scoring, int normalize, float scale, int groups, int kept) -> Tensor",
    fake=lambda grad, logits, *others: torch.empty_like(logits),
)
def _opaque_route_gradient(
    grad: Tensor, logits: Tensor, weights: Tensor, chosen: Tensor, counts: Tensor, load: Tensor, *settings: Any
) -> Tensor:
    return _route_gradient(grad, logits, weights, chosen, counts, load_of(load), _routing(*settings))


def _save_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *output, inputs[2])
    ctx.settings = inputs[3:]


library.differentiable(
    "route",
    _save_route,
    lambda ctx, grad, *_: (_opaque_route_gradient(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 8),
)
