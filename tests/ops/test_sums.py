"""Sums in one order: exact enough, and with the same bits for any number of threads."""

import pytest
import torch

from lockstep import ops
from lockstep.ops import sums


def _randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("count", [0, 1, 31, 1024, 1025, 70_001])
def test_a_total_is_the_sum_rounded_once_with_a_gradient_of_ones(count):
    x = _randn(count).requires_grad_()
    result = ops.total(x)
    expected = x.detach().double().sum()
    # Two orders of adding in float64, then one rounding to float32.
    torch.testing.assert_close(result.detach().double(), expected, rtol=1e-7, atol=1e-12)
    (result * 3).backward()
    assert torch.equal(x.grad, torch.full((count,), 3.0))
    assert torch.equal(ops.total(torch.cat([x.detach(), torch.zeros(9000)])), result), "zeros behind it change nothing"


@pytest.mark.parametrize(
    ("count", "dtype"), [(0, torch.float32), (31, torch.bfloat16), (1025, torch.float32), (70_001, torch.bfloat16)]
)
def test_the_compiled_sum_of_squares_has_the_bits_of_the_plain_one(count, dtype):
    x = _randn(count, dtype=dtype)
    assert torch.equal(ops.sum_of_squares(x), sums._sum_of_blocks(x.double().square()))


def test_a_sum_is_the_same_for_any_number_of_threads_and_other_strides(threads):
    x, results = _randn(300_003), []
    for count in (1, 3):
        threads(count)
        results.append((ops.sum_of_squares(x), ops.total(x)))
    assert all(map(torch.equal, *results))
    strided = _randn(300, 70).T
    assert torch.equal(ops.sum_of_squares(strided), ops.sum_of_squares(strided.contiguous()))


def test_a_sum_of_squares_of_many_elements_is_right():
    # Added one by one in float32, so many lose two percent.
    x = torch.full((1 << 21,), 0.1)
    assert float(ops.sum_of_squares(x)) == pytest.approx((1 << 21) * float(x[0].double() ** 2), rel=1e-14)
