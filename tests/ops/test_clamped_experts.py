"""gpt-oss's experts: a token's bits depend on that token alone, and gradients are those of float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops.bias import add_bias
from tests.ops.test_experts import check_gradients, check_rows_depend_on_themselves, starts_of
from tests.ops.test_linear import DTYPES, cancelling


def mixture(seed, tokens, experts, active, dtype, dim=32, inner=24):
    """Tokens, their experts' weights and the experts' own, of which products cancel, and biases of their size."""
    generator = torch.Generator().manual_seed(seed)
    x, gate_up = cancelling(seed, tokens, dim, experts * 2 * inner, dtype)
    down = cancelling(seed + 1, 1, inner, experts * dim, dtype)[1]
    biases = [torch.randn(experts, size, generator=generator).to(dtype) for size in (2 * inner, dim)]
    chosen = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :active]
    weights = torch.rand(tokens, active, generator=generator)
    shaped = gate_up.view(experts, 2 * inner, dim), down.view(experts, dim, inner)
    return x, weights, chosen, shaped[0], biases[0], shaped[1], biases[1]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_tokens_bits_depend_on_that_token_alone(form, dtype, data):
    check_rows_depend_on_themselves(data, ops.clamped_experts, mixture, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_float64(dtype):
    def expert(y, gate_up, gate_up_bias, down, down_bias):
        both = y @ gate_up.T + gate_up_bias
        gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate) @ down.T + down_bias

    # Roundings of the dtype itself, a few of them in a row; what is near a bound may fall on either side of it.
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    check_gradients(ops.clamped_experts, expert, [(5, 48, 32), (5, 48), (5, 32, 24), (5, 32)], dtype, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_of_groups_is_that_of_each_and_so_is_its_gradient(dtype):
    counts = [3, 0, 130, 1]
    x, grad = (cancelling(seed, sum(counts), 48, 1, dtype)[0] for seed in (1, 2))
    bias = torch.randn(len(counts), 48, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    out = ops.add_grouped_bias(x, bias, starts_of(counts))
    (got,) = torch.autograd.grad(out, bias, grad)
    for group, (rows, grads) in enumerate(zip(x.split(counts), grad.split(counts))):
        first, own = sum(counts[:group]), bias[group].detach().requires_grad_()
        alone = add_bias(rows, own)
        assert torch.equal(out[first : first + len(rows)], alone)
        assert torch.equal(got[group], torch.autograd.grad(alone, own, grads)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_calls_the_same_operators(dtype):
    x, _, _, *rest = mixture(7, 20, 6, 2, dtype)
    router, bias = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).to(dtype), torch.zeros(6)
    inputs, routing = [t.requires_grad_() for t in (x, router, bias, *rest)], ops.Routing(2)

    def layer(x, router, bias, *rest):
        logits = ops.add_bias(ops.router_logits(x, router), bias)
        return ops.clamped_experts(x, *ops.route(logits, routing), *rest)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    out, expected = compiled(*inputs), layer(*inputs)
    grad = torch.ones_like(out)
    assert torch.equal(out, expected)
    for a, b in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)):
        assert torch.equal(a, b)
