"""An adapter's update: one kernel without gradients, an operator for each rounding with them, and equal bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from tests.ops.test_linear import DTYPES, cancelling


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 40),
    depth=st.integers(1, 70),
    rank=st.integers(1, 20),
    outputs=st.integers(1, 70),
    packs=st.booleans(),
    data=st.data(),
)
def test_the_kernel_has_the_bits_of_the_operators_and_leaves_other_rows(
    form, dtype, seed, rows, depth, rank, outputs, packs, data
):
    some = data.draw(st.lists(st.integers(0, rows - 1), unique=True, min_size=1))
    x, a = cancelling(seed, rows, 2 * depth, rank, dtype)
    b, out = (torch.randn(*shape).to(dtype) for shape in ((outputs, rank), (rows, outputs)))
    for chosen in (None, torch.tensor(some)):
        part = slice(None) if chosen is None else chosen
        wanted = out.clone()
        wanted[part] += ops.linear(ops.linear(x[part], a), b) * (8 / 3)
        assert torch.equal(ops.add_low_rank(out, x, a, b, 8 / 3, chosen), wanted)
        with torch.no_grad(), ops.PackedWeights().in_use() if packs else torch.no_grad():
            assert torch.equal(ops.add_low_rank(out.clone(), x, a, b, 8 / 3, chosen), wanted)


def test_gradients_are_those_of_the_rows_alone():
    x, a, b = (torch.randn(*shape, requires_grad=True) for shape in ((5, 8), (2, 8), (6, 2)))
    rows, out = torch.tensor([3, 1]), torch.randn(5, 6, requires_grad=True)
    ops.add_low_rank(out, x, a, b, 0.5, rows).square().sum().backward()
    found = [tensor.grad for tensor in (x, a, b, out)]
    for tensor in (x, a, b, out):
        tensor.grad = None
    update = torch.zeros(5, 5)
    update[rows, rows] = 1.0  # selects the rows
    (out + update @ (x @ a.T @ b.T * 0.5)).square().sum().backward()
    for one, tensor in zip(found, (x, a, b, out)):
        torch.testing.assert_close(
            one, tensor.grad, rtol=1e-5, atol=1e-5
        )  # sums of 8 float32 products, in other orders
    assert not found[0][0].any()


def test_what_does_not_match_is_refused():
    out, x, a, b = (torch.randn(*shape) for shape in ((5, 6), (5, 8), (2, 8), (6, 2)))
    for wrong in ((out, x, a[:, :7], b), (out, x, a, b[:, :1]), (out[:4], x, a, b), (out, x, a, b[:5])):
        with pytest.raises(ValueError, match="matching shapes"), torch.no_grad():
            ops.add_low_rank(*wrong, 0.5)
    with pytest.raises(ValueError, match="one dtype"), torch.no_grad():
        ops.add_low_rank(out, x, a.bfloat16(), b, 0.5)
