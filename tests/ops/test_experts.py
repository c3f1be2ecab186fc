"""Mixtures of experts: a token's bits depend on that token alone, whoever else its experts have."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops import native
from lockstep.ops.routing import SCORINGS
from tests.ops.test_linear import DTYPES, cancelling

linear = importlib.import_module("lockstep.ops.linear")
grouped = importlib.import_module("lockstep.ops.grouped_linear")


def starts_of(counts):
    return torch.tensor([0, *counts]).cumsum(0)


def mixture(seed, tokens, experts, active, dtype, dim=32, inner=48):
    """Tokens, their experts' weights and the experts' own, of which products cancel."""
    generator = torch.Generator().manual_seed(seed)
    x, gate = cancelling(seed, tokens, dim, experts * inner, dtype)
    up = torch.randn(experts, inner, dim, generator=generator).to(dtype)
    down = cancelling(seed + 1, 1, inner, experts * dim, dtype)[1]
    chosen = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :active]
    weights = torch.rand(tokens, active, generator=generator)
    return x, weights, chosen, gate.view(experts, inner, dim), up, down.view(experts, dim, inner)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_grouped_product_is_the_product_of_each_group(form, dtype, data):
    counts = data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 9]), min_size=1, max_size=5))
    depth, outputs = data.draw(st.sampled_from([6, 17, 32])), data.draw(st.sampled_from([5, 32, 64]))
    x, w = cancelling(data.draw(st.integers(0, 99)), sum(counts), depth, len(counts) * outputs, dtype)
    w = w.view(len(counts), outputs, depth)
    got = ops.grouped_linear(x, w, starts_of(counts))
    parts = [linear.product(rows, matrix) for rows, matrix in zip(x.split(counts), w)]
    assert torch.equal(got, torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_panels_that_are_kept_change_no_bit_of_a_grouped_product(dtype):
    x, w = cancelling(3, 12, 64, 3 * 64, dtype)
    w, starts = w.view(3, 64, 64), starts_of([5, 0, 7])
    expected = ops.grouped_linear(x, w, starts)
    weights = ops.PackedWeights()
    with weights.in_use():
        assert torch.equal(ops.grouped_linear(x, w, starts), expected)
        w.mul_(-1)
        weights.forget()
        assert torch.equal(ops.grouped_linear(x, w, starts), -expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_grouped_product_are_those_of_its_groups(dtype):
    counts = [3, 0, 1, 20]
    x, w = cancelling(5, sum(counts), 34, len(counts) * 40, dtype)
    grad, _ = cancelling(6, sum(counts), 40, 1, dtype)
    x, w = x.requires_grad_(), w.view(len(counts), 40, 34).requires_grad_()
    got = torch.autograd.grad(ops.grouped_linear(x, w, starts_of(counts)), [x, w], grad)
    for group, (rows, grads) in enumerate(zip(x.detach().split(counts), grad.split(counts))):
        of_x, of_weight = linear.linear_gradients(grads, rows, w[group].detach())
        first = sum(counts[:group])
        assert torch.equal(got[0][first : first + len(rows)], of_x)
        assert torch.equal(got[1][group], of_weight)


@pytest.mark.parametrize("wrong", [[0, 2, 1, 4], [0, 2, 3], [1, 2, 3, 4], [0, 1, 2, 5]])
def test_starts_that_are_not_of_these_rows_are_refused(wrong):
    with pytest.raises(ValueError, match="starts"):
        ops.grouped_linear(torch.zeros(4, 8), torch.zeros(3, 8, 8), torch.tensor(wrong))


def check_rows_depend_on_themselves(data, experts_of, mixture, dtype):
    """Some of the tokens, and all in another order, of a random mixture, through `experts_of`."""
    experts = data.draw(st.sampled_from([1, 3, 8]))
    active, tokens = data.draw(st.integers(1, min(experts, 4))), data.draw(st.integers(2, 24))
    x, weights, chosen, *matrices = mixture(data.draw(st.integers(0, 99)), tokens, experts, active, dtype)
    whole = experts_of(x, weights, chosen, *matrices)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    assert torch.equal(experts_of(x[order], weights[order], chosen[order], *matrices), whole[order])
    count = data.draw(st.integers(1, tokens))
    assert torch.equal(experts_of(x[:count], weights[:count], chosen[:count], *matrices), whole[:count])


def check_gradients(experts_of, expert, shapes, dtype, tolerance):
    """Of `experts_of` against float64; `expert`: of all rows one expert's output, by its slices of `shapes`."""
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randn(shape, generator=generator) for shape in ((30, 32), (30, 2), *shapes)]
    # The weights are float32 in any dtype, as a router gives them.
    inputs = [(t if i == 1 else t.to(dtype)).requires_grad_() for i, t in enumerate(drawn)]
    chosen = torch.rand(30, 5, generator=generator).argsort(-1)[:, :2]
    out = experts_of(inputs[0], inputs[1], chosen, *inputs[2:])
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    got = torch.autograd.grad(out, inputs, grad)

    wide = [t.detach().double().requires_grad_() for t in inputs]
    y, w, *others = wide
    ones = [expert(y, *own) for own in zip(*others)]
    expected = sum(w[:, j, None] * torch.stack(ones, 1)[torch.arange(len(y)), chosen[:, j]] for j in range(2))
    want = torch.autograd.grad(expected, wide, grad.double())
    for a, b in zip((out, *got), (expected, *want)):
        assert (a.detach().double() - b).abs().max() <= tolerance * b.detach().abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_tokens_bits_depend_on_that_token_alone(form, dtype, data):
    check_rows_depend_on_themselves(data, ops.experts, mixture, dtype)


def test_a_sum_in_the_order_of_the_experts_would_be_noticed():
    """The order of a token's own choices is part of the arithmetic: another gives other bits."""
    x, weights, chosen, *matrices = mixture(0, 40, 8, 4, torch.float32)
    sorted_ones, by = chosen.sort(-1)
    assert not torch.equal(
        ops.experts(x, weights, chosen, *matrices), ops.experts(x, weights.gather(1, by), sorted_ones, *matrices)
    )


def reference_route(logits, routing, bias):
    """In float64, as the papers have it."""
    scores = logits.double()
    if routing.scoring == "sigmoid":
        scores = scores.sigmoid()
    choices = scores if bias is None or routing.scoring != "sigmoid" else scores + bias.double()
    if routing.groups > 1:
        by_group = choices.unflatten(1, (routing.groups, -1))
        worth = by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter(1, worth.topk(routing.groups_kept, -1).indices, True)
        choices = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = choices.topk(routing.active, -1).indices
    weights = (scores.softmax(-1) if routing.scoring == "softmax" else scores).gather(1, chosen)
    if routing.scoring == "softmax_of_chosen":
        weights = weights.softmax(-1)
    elif routing.scoring == "sigmoid" and routing.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routing.scale, chosen


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_routes_and_their_gradients_are_the_papers(form, scoring, normalize, groups):
    generator = torch.Generator().manual_seed(1)
    routing = ops.Routing(3, scoring, normalize, 2.5, groups, min(groups, 2))
    logits = (3 * torch.randn(50, 16, generator=generator)).requires_grad_()
    bias = torch.randn(16, generator=generator) if scoring == "sigmoid" else None
    weights, chosen = ops.route(logits, routing, bias)
    wide = logits.detach().double().requires_grad_()
    expected, expected_chosen = reference_route(wide, routing, bias)
    assert torch.equal(chosen, expected_chosen)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)  # float32's own rounding
    grad = torch.randn(weights.shape, generator=generator)
    (got,), (want,) = torch.autograd.grad(weights, logits, grad), torch.autograd.grad(expected, wide, grad.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)  # as above; of sums that cancel


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_route_depends_on_its_token_alone(form, scoring):
    logits = torch.randn(70, 19, generator=torch.Generator().manual_seed(2)).exp()
    routing = ops.Routing(4, scoring)
    weights, chosen = ops.route(logits, routing)
    for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
        alone = ops.route(logits[rows], routing)
        assert torch.equal(alone[0], weights[rows]) and torch.equal(alone[1], chosen[rows])


def test_of_equal_scores_the_lower_expert_comes_first_and_a_nan_last(form):
    nan = float("nan")
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0], [nan, 1.0, nan, 1.0], [nan, nan, nan, nan], [0.0, -0.0, 0.0, 5.0]])
    _, chosen = ops.route(logits, ops.Routing(3))
    assert chosen.tolist() == [[1, 2, 3], [1, 3, 0], [0, 1, 2], [3, 0, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_mixture_are_those_of_float64(dtype):
    def expert(y, gate, up, down):
        return torch.nn.functional.silu(y @ gate.T) * (y @ up.T) @ down.T

    # Roundings of the dtype itself, a few of them in a row.
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    check_gradients(ops.experts, expert, [(5, 48, 32), (5, 48, 32), (5, 32, 48)], dtype, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_calls_the_same_operators(dtype):
    x, _, _, *matrices = mixture(7, 20, 6, 2, dtype)
    router = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    inputs, routing = [t.requires_grad_() for t in (x, router, *matrices)], ops.Routing(2)

    def layer(x, router, *matrices):
        return ops.experts(x, *ops.route(ops.router_logits(x, router), routing), *matrices)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.mark_dynamic(x, 0)  # of a number of tokens that any operator fixes an error comes
    out, expected = compiled(*inputs), layer(*inputs)
    grad = torch.ones_like(out)
    assert torch.allclose(out, expected, rtol=2e-2)  # the activation between the products is the compiler's
    for a, b in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)):
        assert (a - b).abs().max() <= 3e-2 * b.abs().max().clamp(min=1e-3)


def test_native_and_plain_choose_the_same_experts():
    if native.library() is None:
        pytest.skip("there are no compiled kernels")
    logits = torch.randn(200, 24, generator=torch.Generator().manual_seed(3))
    routing, choice = importlib.import_module("lockstep.ops.routing"), (4, 1, 1, 1.0, 1, 1)
    assert torch.equal(routing._route(logits, None, *choice)[1], routing._route_plainly(logits, None, *choice)[1])
