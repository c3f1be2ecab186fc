"""Operators on rows: values and gradients of float64, a row's bits in any company, sums over rows in one order."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.models.glm4.modeling_glm4 import rotate_half

from lockstep import ops
from lockstep.ops import plain
from tests.ops import definitions

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


def rotated_pairs(x, cos, sin):
    """As transformers' GLM-4 does, which has another layout and a head's last features as they were."""
    width = 2 * cos.shape[-1]
    cos, sin = (part.repeat_interleave(2, -1)[:, None] for part in (cos, sin))
    part = x[..., :width]
    return torch.cat((part * cos + rotate_half(part) * sin, x[..., width:]), -1)


def rotation(rows, dim, dtype, copied):
    """Arguments for heads of which `copied` features are not rotated."""
    angles = 6 * randn(1, rows, dim // 2)
    return randn(0, rows, 3, 2 * (dim // 2) + copied, dtype=dtype), angles.cos(), angles.sin()


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
    "rms_norm with an offset": (
        lambda x, weight: ops.rms_norm(x, weight, 1e-5, offset=True),
        lambda x, weight: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (1 + weight),
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
    "gelu_mul": (
        ops.gelu_mul,
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        lambda rows, dim, dtype: tuple(spread(seed, rows, dim, dtype=dtype) for seed in range(2)),
    ),
    "sigmoid_mul": (
        ops.sigmoid_mul,
        lambda gate, up: F.sigmoid(gate) * up,
        lambda rows, dim, dtype: tuple(spread(seed, rows, dim, dtype=dtype) for seed in range(2)),
    ),
    "relu_squared": (
        ops.relu_squared,
        lambda x: F.relu(x).square(),
        lambda rows, dim, dtype: (spread(0, rows, dim, dtype=dtype),),
    ),
    "rotary": (ops.rotary, rotated, partial(rotation, copied=0)),
    "rotary of some features": (
        ops.rotary,
        lambda x, cos, sin: torch.cat((rotated(x[..., :-5], cos, sin), x[..., -5:]), -1),
        partial(rotation, copied=5),
    ),
    "rotary of neighbors": (partial(ops.rotary, interleaved=True), rotated_pairs, partial(rotation, copied=0)),
    "rotary of some neighbors": (partial(ops.rotary, interleaved=True), rotated_pairs, partial(rotation, copied=40)),
    "add_bias": (
        ops.add_bias,
        lambda x, bias: x + bias,
        lambda rows, dim, dtype: (spread(0, rows, dim, dtype=dtype), spread(1, dim, dtype=dtype)),
    ),
}  # fmt: skip
"""Each operator, its formula, and arguments for it, of which the last one of a norm or bias is for all rows."""
ACTIVATIONS = ("silu_mul", "gelu_mul", "clamped_swiglu", "sigmoid_mul", "relu_squared")


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 50), (torch.float32, 250)])
@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients_are_those_of_float64(name, dtype, dim):
    operator, formula, arguments = OPERATORS[name]
    given = arguments(33, dim, dtype)
    leaves = [x.requires_grad_() for x in given[: 1 if name.startswith("rotary") else 2]]
    out = operator(*leaves, *given[len(leaves) :])
    grad = randn(5, *out.shape, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = formula(*exact, *(x.double() for x in given[len(leaves) :]))
    theirs = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    for mine, reference in zip([out, *torch.autograd.grad(out, leaves, grad)], theirs):
        assert mine.dtype == dtype
        assert (mine.double() - reference).abs().max() < TOLERANCE[dtype] * reference.abs().max()
        if name in ("clamped_swiglu", "relu_squared"):
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
    if name in ACTIVATIONS:  # columns of one product, as an expert's are
        columns = torch.stack((*given, given[0]), -1)
        assert torch.equal(operator(*(columns[..., i] for i in range(len(given)))), whole)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_of_any_gate_is_its_limit(dtype):
    """Where x³ overflows, and at infinity, GELU is 0 or its gate, with a slope of 0 or 1."""
    gate = torch.tensor([[10.5, 1e13, 1e20, 3e38, torch.inf]]).to(dtype)
    gate = torch.cat((gate, -gate), 1).requires_grad_()
    up = torch.full_like(gate, 0.5).requires_grad_()
    out = ops.gelu_mul(gate, up)
    results = [out, *torch.autograd.grad(out, (gate, up), torch.ones_like(out))]
    for result, limit in zip(results, (gate.detach() * 0.5, up.detach(), gate.detach())):
        assert torch.equal(result[:, :5], limit[:, :5])
        assert result[:, 5:].abs().max() < 1e-36
    for broken in range(2):
        arguments = [torch.ones(3, 16), torch.ones(3, 16)]
        arguments[broken][1, 3] = torch.nan
        assert ops.gelu_mul(*arguments).isnan().nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_squared_relu_has_the_same_bits_in_every_form(dtype):
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0]).to(dtype)
    x = torch.cat((spread(0, 2000, dtype=dtype), special))[None].requires_grad_()
    grad = spread(1, *x.shape, dtype=dtype)
    expected = F.relu(x.float()).square().to(dtype)
    out = ops.relu_squared(x)
    (expected_grad,), (of_x,) = (torch.autograd.grad(each, x, grad) for each in (expected, out))
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(of_x, expected_grad, rtol=0, atol=0, equal_nan=True)


def defined_norm(x, weight, offset):
    wide, factors = x.float(), 1 + weight.float() if offset else weight.float()
    squares = torch.zeros(len(x), 16)
    for lanes in F.pad(wide, (0, -x.shape[1] % 16)).split(16, 1):
        squares = plain.multiply_add(lanes, lanes, squares)
    mean = plain.row_sum(squares)[:, None] / x.shape[1] + torch.tensor(1e-5)
    scale = 1 / mean.double().sqrt().float()  # the library's float32 root is not always rounded correctly
    return (wide * scale * factors).to(x.dtype)


def defined_gelu(gate, up, grad):
    """The product and its gradients."""
    value, x = gate.float().clamp(min=-10), gate.float().clamp(-10, 10)
    cubic = 0.07135481627260025 * (x * x)
    power = definitions.exp(x * (cubic + 1.5957691216057308))
    sigmoid = power / (power + 1)
    inner = x * plain.multiply_add(cubic, torch.tensor(3.0), torch.tensor(1.5957691216057308))
    slope = plain.multiply_add(inner, 1 - sigmoid, torch.tensor(1.0))
    parts = value * sigmoid * up.float(), grad.float() * up.float() * sigmoid * slope, grad.float() * value * sigmoid
    return [part.to(gate.dtype) for part in parts]


def defined_rotation(x, cos, sin, interleaved):
    half = cos.shape[1]
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    out, cos, sin = x.clone(), cos[:, None], sin[:, None]
    out[..., a] = plain.multiply_add(x[..., a].float(), cos, -(x[..., b].float() * sin)).to(x.dtype)
    out[..., b] = plain.multiply_add(x[..., b].float(), cos, x[..., a].float() * sin).to(x.dtype)
    return out


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 33), (torch.bfloat16, 250)])
def test_kernels_are_what_defines_them_operation_by_operation(form, dtype, dim):
    if form == "pytorch":
        pytest.skip("has no fused operations")
    weight = spread(3, dim, dtype=dtype)
    x = cancelling_rows(0, 40, dim, dtype)
    for offset in (False, True):
        assert torch.equal(ops.rms_norm(x, weight, 1e-5, offset), defined_norm(x, weight, offset))
    gate, up = (spread(seed, 40, dim, dtype=dtype).requires_grad_() for seed in range(2))
    out, grad = ops.gelu_mul(gate, up), x
    results = [out, *torch.autograd.grad(out, (gate, up), grad)]
    assert all(map(torch.equal, results, defined_gelu(gate.detach(), up.detach(), grad)))
    for interleaved in (False, True):
        for copied in (0, 1, 40):
            heads, cos, sin = rotation(40, dim, dtype, copied)
            heads.requires_grad_()
            grad = randn(2, *heads.shape, dtype=dtype)
            out = ops.rotary(heads, cos, sin, interleaved)
            (of_heads,) = torch.autograd.grad(out, heads, grad)
            assert torch.equal(out, defined_rotation(heads.detach(), cos, sin, interleaved))
            assert torch.equal(of_heads, defined_rotation(grad, cos, -sin, interleaved))


def test_a_rotation_of_more_features_than_a_head_has_is_refused():
    with pytest.raises(ValueError, match="a rotation of 36 features cannot be of heads with 35"):
        ops.rotary(torch.zeros(2, 1, 35), torch.zeros(2, 18), torch.zeros(2, 18))


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


@pytest.mark.parametrize("name", OPERATORS)
def test_a_compiled_graphs_operator_has_the_bits_of_the_eager_one(name):
    operator, _, arguments = OPERATORS[name]
    given = arguments(150, 48, torch.bfloat16)
    leaves = [x.requires_grad_() for x in given[: 1 if name.startswith("rotary") else 2]]
    grad, results = randn(2, *given[0].shape, dtype=torch.bfloat16), []
    torch.compiler.reset()
    for function in (operator, torch.compile(operator, backend="aot_eager", fullgraph=True)):
        out = function(*given)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    if name in ("silu_mul", "rotary"):  # whose operations the compiler fuses with others
        for mine, theirs in zip(*results):
            assert (mine.float() - theirs.float()).abs().max() < TOLERANCE[torch.bfloat16] * theirs.abs().max()
    else:
        assert all(map(torch.equal, *results))
