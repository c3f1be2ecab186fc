"""Sums in one order: exact enough, and with the same bits for any number of threads."""

import pytest
import torch

from lockstep import ops
from lockstep.ops import sums


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("count", [0, 1, 2, 31, 1023, 1024, 1025, 70_001, 1_100_000])
def test_a_total_is_the_sum_rounded_once_with_a_gradient_of_ones(count):
    x = _randn(count).requires_grad_()
    result = ops.total(x)
    expected = x.detach().double().sum()
    # Two orders of adding in float64, then one rounding to float32.
    torch.testing.assert_close(result.detach().double(), expected, rtol=1e-7, atol=1e-12)
    (result * 3).backward()
    assert torch.equal(x.grad, torch.full((count,), 3.0))


def test_a_total_does_not_depend_on_what_is_added_behind_it_as_zeros():
    x = _randn(5000)
    assert torch.equal(ops.total(torch.cat([x, torch.zeros(9000)])), ops.total(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 31, 1024, 1025, 300_001])
def test_the_compiled_sum_of_squares_has_the_bits_of_the_plain_one(dtype, count):
    x = _randn(count, dtype=dtype)
    assert torch.equal(ops.sum_of_squares(x), sums._sum_of_blocks(x.double().square()))


def test_a_sum_of_squares_is_the_same_for_any_number_of_threads(threads):
    x = _randn(1_000_003)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append((ops.sum_of_squares(x), ops.total(x)))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0]))


def test_a_sum_of_squares_of_many_elements_is_right():
    # A sum of so many in float32 loses a percent.
    x = torch.full((1 << 26,), 0.1)
    expected = (1 << 26) * float(x[0].double() ** 2)
    assert float(ops.sum_of_squares(x)) == pytest.approx(expected, rel=1e-14)


def test_a_view_of_other_strides_has_the_sum_of_its_copy():
    x = _randn(300, 70).T
    assert torch.equal(ops.sum_of_squares(x), ops.sum_of_squares(x.contiguous()))
