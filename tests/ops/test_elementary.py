"""Elementary functions against wider arithmetic, and exponential and logarithm as operators."""

import math

import numpy as np
import pytest
import torch

from lockstep import ops
from lockstep.ops.elementary import cosine_and_sine, exponential, logarithm, logistic, power, softplus

WIDE = np.longdouble


@pytest.fixture(scope="module", autouse=True)
def form():
    """These functions have one form."""


SMALL = np.linspace(-1, 1, 1001)


def drawn(lowest, highest):
    return np.random.default_rng(0).uniform(lowest, highest, 100_000)


def _ulps(got, expected):
    return float((np.abs(got - expected) / np.spacing(np.abs(got))).max())


def test_cosine_and_sine_are_right_for_angles_of_millions():
    for largest in (1.0, 100.0, 1e7):
        angles = drawn(-largest, largest)
        # Half an ulp below 1 is 5.55e-17. Up to so much comes of each of the reduction's two last subtractions, times
        # sin(pi / 4), of half the square, of 1 - half the square and of the last sum; of the polynomial up to 7e-18.
        for ours, exact in zip(cosine_and_sine(angles), (np.cos(WIDE(angles)), np.sin(WIDE(angles)))):
            assert np.abs(ours - exact).max() < (2 * 0.7072 + 0.5 + 1 + 1) * 2.0**-54 + 7e-18


def test_the_others_are_right_to_a_few_ulps():
    x = np.concatenate([SMALL, drawn(-700, 700)])
    assert _ulps(exponential(x), np.exp(WIDE(x))) < 1
    # Also where one of two terms is lost.
    assert _ulps(logistic(x), 1 / (1 + np.exp(-WIDE(x)))) < 3
    assert _ulps(softplus(x), np.log1p(np.exp(-np.abs(WIDE(x)))) + np.maximum(WIDE(x), 0)) < 4
    x = np.concatenate([np.exp(drawn(-700, 700)), drawn(0.5, 2.0)])
    assert _ulps(logarithm(x), np.log(WIDE(x))) < 1


def test_they_end_where_float64_ends():
    x = np.array([0.0, -0.0, -1000.0, 1000.0, -math.inf, math.inf])
    assert exponential(x).tolist() == [1.0, 1.0, 0.0, math.inf, 0.0, math.inf]
    assert softplus(x).tolist() == [math.log(2), math.log(2), 0.0, 1000.0, 0.0, math.inf]
    assert logarithm(np.array([1.0, 0.0, math.inf])).tolist() == [0.0, -math.inf, math.inf]
    for function in (exponential, logarithm, logistic, softplus):
        assert np.isnan(function(np.array([math.nan]))).all()
    assert np.isnan(logarithm(np.array([-1.0]))).all()
    assert logarithm(np.array([5e-324]))[0] == np.float64(np.log(WIDE(5e-324)))


def test_their_bits_are_the_same_on_every_processor():
    x = np.float64(np.arange(-40_000, 40_000)) / 1024
    results = [*cosine_and_sine(x * 1000), exponential(x), logarithm(np.abs(x) + 2.0**-30), softplus(x)]
    sums = [int(np.add.reduce(result.view(np.uint64))) % 2**64 for result in results]
    assert sums == [
        18038558529237465561, 4271625225276104521, 6217711554624181719, 1018690640886441767, 290311848239448103,
    ]  # fmt: skip


def test_a_whole_power_is_made_by_squaring():
    assert [power(0.5, n) for n in (0, 1, 3, 1074)] == [1.0, 0.5, 0.125, 5e-324]
    assert math.isclose(power(0.95, 1000), 0.95**1000, rel_tol=1e-13)


def test_exp_is_1_at_0_rounded_once_and_its_own_gradient():
    x = torch.cat([torch.zeros(1), torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 20]).requires_grad_()
    y = ops.exp(x)
    assert y[0] == 1.0 and torch.equal(y.detach(), x.detach().double().exp().float())
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(ops.log(y.detach()), y.detach().double().log().float())


def test_the_logistic_function_is_rounded_once_and_has_gradients_at_any_distance():
    x = (torch.arange(-400, 401) / 4).requires_grad_()
    wide = x.detach().double()
    for function, expected in ((ops.sigmoid, torch.sigmoid), (ops.log_sigmoid, torch.nn.functional.logsigmoid)):
        y = function(x)
        assert torch.equal(y.detach(), expected(wide).float())
        (gradient,) = torch.autograd.grad(y.sum(), x)
        (exact,) = torch.autograd.grad(expected(known := wide.clone().requires_grad_()).sum(), known)
        assert torch.equal(function(x[3]), y[3]), "without dimensions"
        assert torch.autograd.gradgradcheck(function, torch.linspace(-3, 3, 5, dtype=torch.float64).requires_grad_())
        # The slope is that of the rounded result s: 1 - s is off by half an ulp of 1, which is 6e-8.
        assert gradient.isfinite().all() and torch.allclose(gradient.double(), exact, rtol=2e-6, atol=1e-7)
