"""Mixtures of experts, and products with a weight per head: a token's bits depend on that token alone."""

import importlib
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from lockstep import ops
from lockstep.ops.routing import SCORINGS
from tests.ops.test_linear import DTYPES, cancelling

linear = importlib.import_module("lockstep.ops.linear")


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


def clamped_mixture(seed, tokens, experts, active, dtype, inner=48):
    """The same of gpt-oss: gate and up in one matrix, and biases."""
    x, weights, chosen, gate, up, down = mixture(seed, tokens, experts, active, dtype, inner=inner)
    generator = torch.Generator().manual_seed(seed)
    biases = [torch.randn(experts, size, generator=generator).to(dtype) for size in (2 * inner, 32)]
    return x, weights, chosen, torch.cat((gate, up), 1), biases[0], down, biases[1]


MIXTURES = {"gated": (ops.experts, mixture), "clamped": (ops.clamped_experts, clamped_mixture)}
FORMATS = ("none", "int8", "int4", "mxfp8", "float8_rowwise")


def in_formats(kind, format):
    """`MIXTURES` of weights in a format; the last one in another."""
    experts_of, drawn = MIXTURES[kind]
    formats = (format,) * (2 if kind == "gated" else 1) + ("int8" if format == "mxfp8" else format,)
    return partial(experts_of, formats=formats), partial(drawn, inner=64)


@settings(max_examples=8)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_a_grouped_product_is_the_product_of_each_group(form, dtype, data):
    counts = data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 9]), min_size=1, max_size=5))
    depth, outputs = data.draw(st.sampled_from([6, 17, 32])), data.draw(st.sampled_from([5, 32, 64]))
    x, w = cancelling(data.draw(st.integers(0, 99)), sum(counts), depth, len(counts) * outputs, dtype)
    w = w.view(len(counts), outputs, depth)
    got = ops.grouped_linear(x, w, starts_of(counts))
    parts = [linear.product(rows, matrix) for rows, matrix in zip(x.split(counts), w)]
    assert torch.equal(got, torch.cat(parts))
    with ops.PackedWeights().in_use():
        assert torch.equal(ops.grouped_linear(x, w, starts_of(counts)), got), "with panels"


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_grouped_product_and_bias_are_those_of_the_groups(dtype):
    counts = [3, 0, 1, 130]
    x, w = cancelling(5, sum(counts), 34, len(counts) * 40, dtype)
    grad, _ = cancelling(6, sum(counts), 40, 1, dtype)
    bias = torch.randn(len(counts), 40, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    x, w = x.requires_grad_(), w.view(len(counts), 40, 34).requires_grad_()
    out = ops.add_grouped_bias(ops.grouped_linear(x, w, starts_of(counts)), bias, starts_of(counts))
    got = torch.autograd.grad(out, [x, w, bias], grad)
    for group, (rows, grads) in enumerate(zip(x.detach().split(counts), grad.split(counts))):
        of_x, of_weight = linear.linear_gradients(grads, rows, w[group].detach())
        own, first = bias[group].detach().requires_grad_(), sum(counts[:group])
        alone = ops.add_bias(linear.product(rows, w[group].detach()), own)
        assert torch.equal(out[first : first + len(rows)], alone)
        assert torch.equal(got[0][first : first + len(rows)], of_x) and torch.equal(got[1][group], of_weight)
        assert torch.equal(got[2][group], torch.autograd.grad(alone, own, grads)[0])


def test_starts_that_are_not_of_these_rows_are_refused():
    for wrong in ([0, 2, 1, 4], [0, 2, 3], [1, 2, 3, 4], [0, 1, 2, 5]):
        with pytest.raises(ValueError, match="starts"):
            ops.grouped_linear(torch.zeros(4, 8), torch.zeros(3, 8, 8), torch.tensor(wrong))


@settings(max_examples=16)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(list(MIXTURES)),
    format=st.sampled_from(FORMATS),
)
def test_a_tokens_bits_depend_on_that_token_alone(form, dtype, kind, format, data):
    """Some of the tokens, and all in another order, of a random mixture."""
    experts_of, drawn = in_formats(kind, format)
    experts = data.draw(st.sampled_from([1, 3, 8]))
    active, tokens = data.draw(st.integers(1, min(experts, 4))), data.draw(st.integers(2, 24))
    x, weights, chosen, *matrices = drawn(data.draw(st.integers(0, 99)), tokens, experts, active, dtype)
    whole = experts_of(x, weights, chosen, *matrices)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    assert torch.equal(experts_of(x[order], weights[order], chosen[order], *matrices), whole[order])
    count = data.draw(st.integers(1, tokens))
    assert torch.equal(experts_of(x[:count], weights[:count], chosen[:count], *matrices), whole[:count])


def _product_in(format):
    return lambda rows, weight: ops.FORMATS[format].linear(rows, weight, 1)


@pytest.mark.parametrize("formats", [("int8", "int4", "float8_rowwise"), ("mxfp8", "none", "int8")])
@pytest.mark.parametrize("kind", MIXTURES)
def test_each_product_of_an_expert_is_that_of_its_format(form, kind, formats):
    experts_of, drawn = in_formats(kind, "none")
    x, weights, chosen, *matrices = drawn(3, 20, 4, 2, torch.bfloat16)
    starts, places, sources = ops.order_by_expert(chosen, 4)
    first, second, last = (_product_in(name) for name in formats)
    parts = []
    for rows, *own in zip(ops.dispatch(x, places, sources).split(starts.diff().tolist()), *matrices):
        if kind == "gated":
            parts.append(last(ops.silu_mul(first(rows, own[0]), second(rows, own[1])), own[2]))
            continue
        both = ops.add_bias(first(rows, own[0]), own[1])
        parts.append(ops.add_bias(last(ops.clamped_swiglu(both[:, ::2], both[:, 1::2]), own[2]), own[3]))
    used = formats if kind == "gated" else formats[::2]
    got = experts_of(x, weights, chosen, *matrices, formats=used)
    assert torch.equal(got, ops.combine(torch.cat(parts), weights, places))


def gated(y, gate, up, down):
    return torch.nn.functional.silu(y @ gate.T) * (y @ up.T) @ down.T


def gated_and_clamped(y, gate_up, gate_up_bias, down, down_bias):
    both = y @ gate_up.T + gate_up_bias
    gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate) @ down.T + down_bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MIXTURES)
def test_gradients_of_a_mixture_are_those_of_float64(kind, dtype):
    experts_of, drawn = MIXTURES[kind]
    expert = gated if kind == "gated" else gated_and_clamped
    shapes = [(30, 32), (30, 2), *(m.shape for m in drawn(0, 1, 5, 2, dtype)[3:])]
    generator = torch.Generator().manual_seed(4)
    # The weights are float32 in any dtype, as a router gives them.
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs = [(t if i == 1 else t.to(dtype)).requires_grad_() for i, t in enumerate(values)]
    chosen = torch.rand(30, 5, generator=generator).argsort(-1)[:, :2]
    out = experts_of(inputs[0], inputs[1], chosen, *inputs[2:])
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    got = torch.autograd.grad(out, inputs, grad)

    wide = [t.detach().double().requires_grad_() for t in inputs]
    y, w, *others = wide
    ones = torch.stack([expert(y, *own) for own in zip(*others)], 1)
    expected = sum(w[:, j, None] * ones[torch.arange(len(y)), chosen[:, j]] for j in range(2))
    want = torch.autograd.grad(expected, wide, grad.double())
    # Roundings of the dtype itself, a few of them in a row; what is near a bound may fall on either side of it.
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for a, b in zip((out, *got), (expected, *want)):
        assert (a.detach().double() - b).abs().max() <= tolerance * b.detach().abs().max()


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


@pytest.mark.parametrize(
    ("scoring", "normalize", "groups"),
    [("softmax", True, 1), ("softmax_of_chosen", True, 4), ("sigmoid", True, 1), ("sigmoid", False, 4)],
)
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


@pytest.mark.parametrize(("kind", "dtype"), [("gated", torch.float32), ("clamped", torch.bfloat16)])
@pytest.mark.parametrize("format", ["none", "int4", "mxfp8"])
def test_compiled_code_calls_the_same_operators(form, kind, dtype, format):
    experts_of, drawn = in_formats(kind, format)
    x, _, _, *matrices = drawn(7, 20, 6, 2, dtype)
    router, bias = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).to(dtype), torch.zeros(6)
    inputs, routing = [t.requires_grad_() for t in (x, router, bias, *matrices)], ops.Routing(2)

    def layer(x, router, bias, *matrices):
        logits = ops.add_bias(ops.router_logits(x, router), bias)
        return experts_of(x, *ops.route(logits, routing), *matrices)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.mark_dynamic(x, 0)  # of a number of tokens that any operator fixes an error comes
    out, expected = compiled(*inputs), layer(*inputs)
    grad = torch.ones_like(out)
    # The activation between the products of gated experts is the compiler's.
    tolerance = 3e-2 if kind == "gated" else 0.0
    for a, b in zip(
        (out, *torch.autograd.grad(out, inputs, grad)), (expected, *torch.autograd.grad(expected, inputs, grad))
    ):
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-3)


class _NothingReadsValues(TorchFunctionMode):
    """Of tensors without values only shapes can be known. Copies to the CPU, which are none here, are refused, too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.cpu, torch.Tensor.numpy):
            raise DataDependentOutputException(func)
        return func(*args, **(kwargs or {}))


def test_nothing_between_a_mixtures_products_waits_for_their_values(form, monkeypatch):
    if form != "pytorch":
        pytest.skip("only a GPU's kernels, for which the plain forms stand, are launched without waiting")
    product = importlib.import_module("lockstep.ops.grouped_linear")._grouped_linear
    monkeypatch.setattr(product, "forward", lambda x, weight, starts: x.new_empty(x.shape[0], weight.shape[1]))
    with FakeTensorMode(), _NothingReadsValues():
        x, router, bias = torch.randn(5, 32), torch.randn(8, 32), torch.randn(8)
        gate, up, down = (torch.randn(8, *shape) for shape in ((16, 32), (16, 32), (32, 16)))
        routes = ops.route(ops.router_logits(x, router), ops.Routing(4, "sigmoid", groups=4, groups_kept=2), bias)
        assert ops.experts(x, *routes, gate, up, down).shape == x.shape
        routes = ops.route(ops.add_bias(ops.router_logits(x, router), bias), ops.Routing(2))
        both, biases = torch.randn(8, 32, 32), torch.randn(8, 32)
        assert ops.clamped_experts(x, *routes, both, biases, down, biases).shape == x.shape
        with pytest.raises(DataDependentOutputException):
            routes[1].max().item()


HEADS, ROWS, FIRST, STOP = 3, 40, 6, 22
"""Each head has 40 rows of the weight, of which a product takes those from 6 to 22."""


def _factors(dtype, across, tokens=70):
    """`x` [tokens, heads, in] and `weight` [heads · 40, 24], whose products cancel."""
    width, weight = 24, torch.randn(HEADS, ROWS, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = []
    for head in range(HEADS):
        x, own = cancelling(head, tokens, STOP - FIRST if across else width, width if across else STOP - FIRST, dtype)
        weight[head, FIRST:STOP] = own.T if across else own
        parts.append(x)
    return torch.stack(parts, 1), weight.flatten(0, 1)


def _alone(x, weight, across):
    """The definition: each head's product by itself."""
    parts = weight.view(HEADS, ROWS, -1)[:, FIRST:STOP]
    parts = parts.mT if across else parts
    return torch.stack([ops.linear(x[:, head].contiguous(), part.contiguous()) for head, part in enumerate(parts)], 1)


@pytest.mark.parametrize(("dtype", "across"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_heads_product_is_that_of_its_part_alone_for_any_number_of_rows(dtype, across):
    x, weight = _factors(dtype, across)
    expected = _alone(x, weight, across)
    assert expected.abs().max() > 0
    for rows in (slice(0, 70), slice(0, 1), slice(5, 13), slice(69, 70)):
        assert torch.equal(ops.head_linear(x[rows], weight, FIRST, STOP, across), expected[rows])


@pytest.mark.parametrize("across", [False, True])
def test_gradients_of_a_product_of_heads_are_those_of_the_products_alone(across):
    x, weight = _factors(torch.float32, across)
    grads = []
    for product in (lambda x, w: ops.head_linear(x, w, FIRST, STOP, across), lambda x, w: _alone(x, w, across)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = product(*leaves)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
        grads.append([leaf.grad for leaf in leaves])
    for own, other in zip(*grads):
        # In the plain form a library's products, whose bits are its own.
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-4)
    graph = torch.compile(lambda x, w: ops.head_linear(x, w, FIRST, STOP, across), backend="aot_eager", fullgraph=True)
    assert torch.equal(graph(x, weight), ops.head_linear(x, weight, FIRST, STOP, across)), "opaque to a compiler"
    rows = grads[0][1].view(HEADS, ROWS, -1)
    assert not rows[:, :FIRST].any() and not rows[:, STOP:].any() and rows[:, FIRST:STOP].any()
