"""Operators on rows: values and gradients of float64, a row's bits in any company, sums over rows in one order."""

import pytest
import torch
import torch.nn.functional as F

from lockstep import ops

DTYPES = [torch.float32, torch.bfloat16]
# One rounding of the result to its dtype; in float32 those of an exponential and of sums of up to 250 terms.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
ROWS = 601


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spread(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Far beyond the bounds of a clamp, and around zero."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draw) * 10.0 ** torch.randint(-2, 2, shape, generator=draw)
    return x.to(dtype)


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def clamped(gate, up):
    # Not `clamp`, whose gradient on a bound depends on the version of torch.
    gate = torch.where(gate > 7.0, 7.0, gate)
    up = torch.where(up.abs() > 7.0, 7.0 * up.sign(), up)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


OPERATORS = {
    "rms_norm": (
        lambda x, weight: ops.rms_norm(x, weight, 1e-5),
        lambda x, weight: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight,
        lambda rows, dim, dtype: (randn(0, rows, dim, dtype=dtype), randn(1, dim, dtype=dtype)),
    ),
    "silu_mul": (
        ops.silu_mul,
        lambda gate, up: F.silu(gate) * up,
        lambda rows, dim, dtype: tuple(randn(seed, rows, dim, dtype=dtype) for seed in range(2)),
    ),
    "clamped_swiglu": (
        ops.clamped_swiglu,
        clamped,
        lambda rows, dim, dtype: tuple(spread(seed, rows, dim, dtype=dtype) for seed in range(2)),
    ),
    "rotary": (
        ops.rotary,
        rotated,
        lambda rows, dim, dtype: (
            randn(0, rows, 3, 2 * (dim // 2), dtype=dtype),
            *(function(6 * randn(1, rows, dim // 2)) for function in (torch.cos, torch.sin)),
        ),
    ),
    "add_bias": (
        ops.add_bias,
        lambda x, bias: x + bias,
        lambda rows, dim, dtype: (spread(0, rows, dim, dtype=dtype), spread(1, dim, dtype=dtype)),
    ),
}  # fmt: skip
"""Each operator, its formula, and arguments for it, of which the last one of a norm or bias is for all rows."""


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 50), (torch.float32, 250)])
@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients_are_those_of_float64(name, dtype, dim):
    operator, formula, arguments = OPERATORS[name]
    given = arguments(33, dim, dtype)
    leaves = [x.requires_grad_() for x in given[: 1 if name == "rotary" else 2]]
    out = operator(*leaves, *given[len(leaves) :])
    grad = randn(5, *out.shape, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = formula(*exact, *(x.double() for x in given[len(leaves) :]))
    theirs = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    for mine, reference in zip([out, *torch.autograd.grad(out, leaves, grad)], theirs):
        assert mine.dtype == dtype
        assert (mine.double() - reference).abs().max() < TOLERANCE[dtype] * reference.abs().max()
        if name == "clamped_swiglu":
            # Below e^-87 the exponential is zero: what is left of such a gate is below 1e-30.
            relative = 1e-6 if dtype == torch.float32 else 8e-3
            assert ((mine.double() - reference).abs() <= relative * reference.abs() + 1e-6).all()
    assert name != "add_bias" or torch.equal(out, expected.to(dtype)), "rounded once"


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 33), (torch.bfloat16, 250), (torch.bfloat16, 512)])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_has_the_same_bits_in_any_company(name, dtype, dim):
    operator, _, arguments = OPERATORS[name]
    given = arguments(ROWS, dim, dtype)
    whole = operator(*given)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 40), slice(599, 601)):
        assert torch.equal(operator(*(x[rows] if len(x) == ROWS else x for x in given)), whole[rows])
    if name == "clamped_swiglu":  # columns of one product, as an expert's are
        both = torch.stack(given, -1)
        assert torch.equal(operator(both[..., 0], both[..., 1]), whole)


def test_a_value_on_a_bound_has_the_gradient_of_one_within_it():
    # The sigmoid of 1.702 * 7 is 1 within both roundings: of `(up + 1) gate`, the gradients are up + 1 and the gate.
    for dtype in DTYPES:
        gate = torch.tensor([7.0, 7.0625, 7.0, 7.0, 7.0, 7.0]).to(dtype).requires_grad_()
        up = torch.tensor([1.0, 1.0, 7.0, -7.0, 7.0625, -7.0625]).to(dtype).requires_grad_()
        of_gate, of_up = torch.autograd.grad(ops.clamped_swiglu(gate[None], up[None]).sum(), (gate, up))
        torch.testing.assert_close(of_gate.float(), torch.tensor([2.0, 0.0, 8.0, -6.0, 8.0, -6.0]), rtol=8e-3, atol=0)
        torch.testing.assert_close(of_up.float(), torch.tensor([7.0, 7.0, 7.0, 7.0, 0.0, 0.0]), rtol=8e-3, atol=0)
    for broken in range(2):
        arguments = [torch.ones(3, 16), torch.ones(3, 16)]
        arguments[broken][1, 3] = torch.nan
        assert ops.clamped_swiglu(*arguments).isnan().nonzero().tolist() == [[1, 3]]


def cancelling_rows(seed: int, rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that cancel: another order of their sum shows."""
    x = randn(seed, rows, dim) * torch.exp2(torch.randint(-4, 5, (rows, dim)).float())
    half = rows // 2
    x[half : 2 * half] = -x[:half] + 1e-3 * x[half : 2 * half]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_biass_gradient_is_summed_in_slabs_of_64_rows_whatever_the_threads_and_the_padding(form, threads, dtype):
    if form == "pytorch":
        pytest.skip("a library's sums")
    bias, grad = torch.zeros(33, dtype=dtype, requires_grad=True), cancelling_rows(0, 300, 33, dtype)

    def gradient(grad):
        return torch.autograd.grad(ops.add_bias(torch.zeros_like(grad), bias), bias, grad)[0]

    total = torch.zeros(33)
    for slab in grad.float().split(64):
        sums = torch.zeros(33)
        for row in slab:
            sums += row
        total += sums
    assert torch.equal(gradient(torch.cat((grad, grad.new_zeros(7, 33)))), total.to(dtype))
    for count in (1, 3):
        threads(count)
        assert torch.equal(gradient(grad), total.to(dtype))


def test_an_embeddings_gradient_is_summed_in_the_order_of_the_tokens_for_any_number_of_threads(threads):
    tokens = torch.randint(0, 50, (2000,), generator=torch.Generator().manual_seed(0))
    grad = randn(1, 2000, 96) * 10 ** randn(2, 2000, 1)
    expected = torch.zeros(50, 96)
    for token, row in zip(tokens.tolist(), grad):
        expected[token] += row
    for count in (1, 3):
        threads(count)
        weight = torch.zeros(50, 96, requires_grad=True)
        ops.embedding(tokens, weight).backward(grad)
        assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("operator", ["add_bias", "clamped_swiglu"])
def test_a_compiled_graphs_operator_has_the_bits_of_the_eager_one(operator):
    leaves = [x.requires_grad_() for x in OPERATORS[operator][2](150, 48, torch.bfloat16)]
    grad, results = randn(2, 150, 48, dtype=torch.bfloat16), []
    for function in (getattr(ops, operator), getattr(torch.ops.lockstep, operator)):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(map(torch.equal, *results))
