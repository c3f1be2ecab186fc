"""Float8 products: a row's bits, and gradients of operands rounded as torchao's recipes round them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from lockstep import ops
from lockstep.ops import float8, float8_grouped, float8_products, one_order, step_graph
from tests.ops.test_float8 import block_exponent, nearest, row_exponent
from tests.ops.test_linear import cancelling

DTYPES = [torch.float32, torch.bfloat16]
BY_ROW = ["rowwise", "rowwise_high_precision_weight_gradient", "mxfp8_floor", "mxfp8_rceil"]
KINDS = ["tensorwise", *BY_ROW]
product = float8_products.float8_linear


@pytest.mark.parametrize("kind", BY_ROW)
@settings(max_examples=6)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_a_row_has_the_same_bits_alone_among_others_and_in_any_order(form, kind, dtype, data):
    rows, blocks, outputs = (data.draw(st.integers(1, most)) for most in (40, 3, 40))
    seed = data.draw(st.integers(0, 99))
    x, w = cancelling(seed, rows, 32 * blocks, outputs, dtype)
    x = x * torch.exp2(torch.arange(rows) % 31 - 15.0).to(dtype)[:, None]  # scales of the batch would show
    whole = product(x, w, kind)
    assert not whole.isnan().any()
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(product(x[order], w, kind), whole[order])
    cut = data.draw(st.integers(0, rows))
    assert torch.equal(torch.cat([product(x[:cut], w, kind), product(x[cut:], w, kind)]), whole)
    row = data.draw(st.integers(0, rows - 1))
    assert torch.equal(product(x[row : row + 1], w, kind), whole[row : row + 1])


def rounded(x, kind, dim):
    """Rounded for a product over `dim`, in float64: powers of two per row or block, found by trying them."""
    if dim == 0:
        return rounded(x.T, kind, 1).T
    blocks = x.double()
    if kind.startswith("mxfp8"):
        blocks = torch.nn.functional.pad(blocks, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
        exponents = [[block_exponent(size, kind[6:]) for size in row] for row in blocks.abs().amax(2).tolist()]
    else:
        exponents = [row_exponent(size) for size in blocks.abs().amax(1).tolist()]
    powers = torch.tensor(exponents).double().exp2()[..., None]
    return (nearest(blocks / powers) * powers).reshape(len(x), -1)[:, : x.shape[1]]


def rounded_tensor(x):
    size = x.abs().max().item()
    power = 2.0 ** row_exponent(size)
    return nearest(x.double() / power) * power


def integers(seed, rows, columns, dtype, large_row=-1, large_column=-1):
    """Integers up to 60 with few factors of two. In each 32, one row and one column of numbers 2^10 times as large,
    which make their row's or block's scale, and a row and a column of zeros beside: where another factor's is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-60, 61, (rows, columns), generator=generator).float()
    x *= torch.exp2(torch.randint(-1, 2, (rows, 1), generator=generator))
    x *= torch.exp2(torch.randint(-1, 2, (1, columns), generator=generator))
    for at, place in ((x, large_row), (x.T, large_column)):
        if place >= 0:
            at[place::32] = at[place::32].abs().clamp(min=1) * 2.0**10
            at[1 - place :: 32] = 0
    return x.to(dtype)


def computed(x, w, grad, kind, chunks=1):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = product(x, w, kind, chunks)
    out.backward(grad)
    return out.detach(), x.grad, w.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BY_ROW)
def test_each_product_is_of_operands_rounded_along_its_sum(kind, dtype):
    x, w = integers(0, 70, 64, dtype, 0, 0), integers(1, 40, 64, dtype, 1, 1)
    grad = integers(2, 70, 40, dtype, 1, 0)
    weight_gradient = rounded(grad, kind, 0).T @ rounded(x, kind, 0)
    input_gradient = rounded(grad, kind, 1) @ rounded(w, kind, 0)
    if kind == "rowwise_high_precision_weight_gradient":
        weight_gradient = grad.double().T @ x.double()
        input_gradient = rounded(grad, kind, 1) @ rounded_tensor(w)
    expected = rounded(x, kind, 1) @ rounded(w, kind, 1).T, input_gradient, weight_gradient
    for result, sums in zip(computed(x, w, grad, kind), expected):
        assert torch.equal(sums.float().double(), sums), "sums are exact"
        assert torch.equal(result, sums.to(dtype))


def scaled_values(seed, rows, columns, largest, scale, dtype):
    """Float8 values, of which only one is large, and the same times a scale that is no power of two."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, (rows, columns), generator=generator).double() / (16 if largest > 448 else 1)
    values[seed, seed] = largest
    return values, (values * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensorwise_sums_are_multiplied_once_by_both_scales(dtype):
    codes_x, x = scaled_values(0, 70, 64, 448, 0.3, dtype)
    codes_w, w = scaled_values(1, 40, 64, 448, 0.0123, dtype)
    codes_grad, grad = scaled_values(2, 70, 40, 57344, 1.7e-9, dtype)
    scales = [1 / (most / t.abs().max().double()).float() for t, most in ((x, 448), (w, 448), (grad, 57344))]
    of_x, of_w, of_grad = scales
    expected = [
        (codes_x @ codes_w.T, of_x * of_w),
        (codes_grad @ codes_w, of_grad * of_w),
        (codes_grad.T @ codes_x, of_grad * of_x),
    ]
    for result, (sums, scale) in zip(computed(x, w, grad, "tensorwise"), expected):
        assert torch.equal(sums.float().double(), sums), "sums are exact"
        assert torch.equal(result, (sums.float() * scale).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_a_product_in_chunks(kind):
    x, w = cancelling(5, 9, 128, 20, torch.bfloat16)
    left, right = float8_products.RECIPES[kind].operand(x, -1), float8_products.rounded_weight(w, kind)
    sums = float8_products.product_sums(left.values, right.values, 4)
    if kind == "tensorwise":
        sums = sums * (left.scale * right.scale)
    assert torch.equal(product(x, w, kind, 4), sums.bfloat16())
    parameter = torch.nn.Parameter(w)
    right = float8_products.rounded_weight(parameter, kind)
    out = float8_products.rounded_product(x, right, kind, 4)
    assert torch.equal(out, sums.bfloat16()) and not out.requires_grad and not right.values.requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rowwise", "mxfp8_floor", "mxfp8_rceil"])
def test_ranks_that_hold_parts_of_the_rows_meet_in_the_same_bits(form, kind, dtype):
    x, w = cancelling(6, 9, 256, 20, dtype)
    whole = product(x, w, kind, 4)
    parts = [t.chunk(2, 1) for t in (x, w)]
    if kind == "rowwise":
        scales = [torch.stack([float8.row_scales(part) for part in both]).amax(0) for both in parts]
        values = [[float8.scaled_values(part, scale) for part in both] for both, scale in zip(parts, scales)]
    else:
        values = [[float8.block_values(part, kind[6:]) for part in both] for both in parts]
    sums = [float8_products.product_sums(left, right, 2) for left, right in zip(*values)]
    assert torch.equal((sums[0] + sums[1]).to(dtype), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_sums_in_the_products_order(form, kind):
    if form == "pytorch":
        pytest.skip("without compiled kernels, a library sums gradients")
    (x, w), grad = cancelling(3, 900, 64, 40, torch.float32), cancelling(4, 900, 40, 1, torch.float32)[0]
    recipe = float8_products.RECIPES[kind]
    grad_of_input, grad_of_weight = recipe.gradient(grad, -1), recipe.gradient(grad, -2)
    weight, rows = recipe.weight_for_input(w, -2), recipe.operand(x, -2)
    sums = [
        float8_products.product_sums(grad_of_input.values, weight.values.T),
        float8_products.product_sums(grad_of_weight.values.T, rows.values.T),
    ]
    if kind == "tensorwise":
        sums = [sums[0] * (grad_of_input.scale * weight.scale), sums[1] * (grad_of_weight.scale * rows.scale)]
    if not recipe.rounds_weight_gradient:
        sums[1] = float8_products.product_sums(grad.T, x.T)
    for result, expected in zip(computed(x, w, grad, kind)[1:], sums):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", BY_ROW)
def test_a_number_that_is_not_finite_shows_in_its_row_and_in_no_other(kind, bad):
    x, w, grad = integers(0, 6, 64, torch.float32), integers(1, 5, 64, torch.float32), torch.ones(6, 5)
    good, broken = computed(x, w, grad, kind), x.clone()
    broken[2, 3] = bad
    result = computed(broken, w, grad, kind)
    others = torch.arange(6) != 2
    assert result[0][2].isnan().all() and torch.equal(result[0][others], good[0][others])
    assert result[2].isfinite().logical_not().any(), "the weight's gradient shows it"
    assert not product(x, w, kind).isnan().any() and product(broken, w, "tensorwise").isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_operands_are_saved_and_only_needed_gradients_computed(kind):
    x, w = integers(0, 7, 32, torch.bfloat16), integers(1, 5, 32, torch.bfloat16)
    w.requires_grad_()
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = product(x, w, kind)
    assert {t.data_ptr() for t in saved} <= {x.data_ptr(), w.data_ptr()}
    out.sum().backward()
    assert x.grad is None and torch.equal(w.grad, computed(x, w.detach(), torch.ones_like(out), kind)[2])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_no_output_and_gradients_of_zero(kind):
    x, w = torch.randn(0, 64), integers(1, 5, 64, torch.float32)
    out, grad_x, grad_w = computed(x, w, torch.randn(0, 5), kind)
    assert out.shape == (0, 5) and grad_x.shape == (0, 64) and torch.equal(grad_w, torch.zeros(5, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_calls_the_same_operator(form, kind):
    x, w, grad = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((5, 32), (7, 32), (5, 7))
    )
    x.requires_grad_(), w.requires_grad_()
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)(x, w, kind)
    compiled.backward(grad)
    for result, expected in zip((compiled, x.grad, w.grad), computed(x.detach(), w.detach(), grad, kind)):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_graph_replays_the_rounding_of_new_rows(form, kind):
    if form == "pytorch":
        pytest.skip("step graphs record compiled kernels")
    x, w = cancelling(0, 3, 64, 20, torch.bfloat16)
    weight = float8_products.rounded_weight(w, kind)
    rows = x.clone()
    graph = step_graph.StepGraph(lambda: (float8_products.rounded_product(rows, weight, kind),), step_graph.Arena())
    rows.copy_(x.flip(0) * 3)
    assert torch.equal(graph.replay()[0], product(x.flip(0) * 3, w, kind))


@pytest.mark.parametrize("kind", BY_ROW)
def test_packed_panels_are_those_of_the_rounded_weight(form, kind):
    if form == "pytorch":
        pytest.skip("the plain form packs nothing")
    x, w = cancelling(0, 3, 64, 96, torch.bfloat16)
    packed = ops.PackedWeights()
    expected = product(x, w, kind)
    with torch.no_grad(), packed.in_use():
        for _ in range(2):
            assert torch.equal(product(x, w, kind), expected)
        assert [address for address, _ in packed._panels] == [w.data_ptr()]
        w.mul_(2)
        assert torch.equal(product(x, w, kind), expected * 2)
        assert torch.equal(ops.linear(x, w), ops.linear(x, w.clone())), "and not those of its own numbers"


@pytest.mark.parametrize("kind", BY_ROW)
def test_groups_read_packed_panels_of_their_rounded_weights(form, kind):
    if form == "pytorch":
        pytest.skip("the plain form packs nothing")
    x, w = cancelling(0, 5, 64, 3 * 45, torch.bfloat16)
    weight, starts = w.view(3, 45, 64), torch.tensor([0, 4, 4, 5])
    packed, grouped = ops.PackedWeights(), float8_grouped.float8_grouped_linear
    expected = grouped(x, weight, starts, kind)
    with torch.no_grad(), packed.in_use():
        for _ in range(2):
            assert torch.equal(grouped(x, weight, starts, kind), expected)
        assert [address for address, _ in packed._panels] == [w.data_ptr()]
        weight.mul_(2)
        assert torch.equal(grouped(x, weight, starts, kind), expected * 2)
        assert torch.equal(ops.grouped_linear(x, weight, starts), ops.grouped_linear(x, weight.clone(), starts))


class Half(one_order.SharedRows):
    """Half of the rows of two ranks, which can see all of them."""

    is_first = True

    def __init__(self, rank, *wholes):
        self.rank, self.wholes = rank, {whole.shape[1]: whole for whole in wholes}

    def gather(self, local):
        return self.wholes[local.shape[1]]

    def part(self, count):
        return slice(self.rank * count // 2, (self.rank + 1) * count // 2)

    whole = own_of = gather


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_tokens_round_all_of_them_for_the_weights_gradient(form, kind):
    if form == "pytorch":
        pytest.skip("one order needs the compiled product")
    x, w, grad = cancelling(0, 66, 64, 1, torch.float32)[0], torch.randn(8, 64), torch.randn(66, 8)
    with one_order.one_order(1):
        whole = computed(x, w, grad, kind)[2]
        parts = []
        for rank, rows in enumerate((slice(0, 33), slice(33, 66))):
            one_order.share(Half(rank, x, grad), None)
            parts.append(computed(x[rows], w, grad[rows], kind)[2])
            assert parts[-1][one_order.shared_tokens().part(8)].abs().max() > 0
        one_order.share(None, None)
    assert torch.equal(parts[0] + parts[1], whole)


def test_what_a_float8_product_cannot_do_is_refused(form):
    x, w = torch.randn(4, 48), torch.randn(8, 48)
    with pytest.raises(ValueError, match="input features in blocks of 32, but has 48; keep this layer in bfloat16"):
        float8_products.float8_linear(x, w, "mxfp8_rceil")
    with pytest.raises(ValueError, match='kind of a float8 product is "mxfp8_even"; it can be tensorwise, rowwise'):
        float8_products.float8_linear(x, w, "mxfp8_even")
    with pytest.raises(
        ValueError, match=r"both float32 or both bfloat16, but has \[4, 48\] torch.float32 and .*bfloat16"
    ):
        product(x, w.bfloat16(), "rowwise")
    with pytest.raises(ValueError, match=r"both float32 or both bfloat16, but has .*float16"):
        product(x.half(), w.half(), "rowwise")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BY_ROW)
def test_a_group_of_rows_has_the_product_and_gradients_of_its_weight(form, kind, dtype):
    bounds = [0, 37, 37, 70]  # an empty group, and last blocks of other lengths
    x, grad = integers(0, 70, 64, dtype, 0, 0), integers(2, 70, 40, dtype, 1, 0)
    weight = torch.stack([integers(seed, 40, 64, dtype, 1, 1) * 2.0**seed for seed in (1, 3, 4)])
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = float8_grouped.float8_grouped_linear(*leaves, torch.tensor(bounds), kind)
    out.backward(grad)
    for group, rows in enumerate(map(slice, bounds, bounds[1:])):
        expected = computed(x[rows], weight[group], grad[rows], kind)
        for result, one in zip((out[rows], leaves[0].grad[rows], leaves[1].grad[group]), expected):
            assert torch.equal(result, one)


def test_what_a_grouped_float8_product_cannot_do_is_refused():
    x, weight, starts = torch.randn(4, 48), torch.randn(2, 8, 48), torch.tensor([0, 1, 4])
    with pytest.raises(ValueError, match="experts have no tensorwise float8 product; use a kind with scales per row"):
        float8_grouped.float8_grouped_linear(x, weight, starts, "tensorwise")
    with pytest.raises(ValueError, match="input features in blocks of 32, but has 48"):
        float8_grouped.float8_grouped_linear(x, weight, starts, "mxfp8_rceil")
