"""A factor per row: values, gradients, the same bits in any company and in compiled graphs."""

import pytest
import torch

from lockstep import ops

# Roundings of the result and of the gradients, relative to the largest value.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def drawn(rows, dim, dtype):
    """Logits, values that cancel in a row's sum, and a gradient."""
    draw = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, 1, generator=draw)
    x = torch.randn(rows, dim, generator=draw) * (12 * torch.rand(rows, 1, generator=draw)).exp2()
    x[:, dim // 2 :] = -x[:, : dim - dim // 2] * (1 + 2.0**-8)
    return logits.requires_grad_(), x.to(dtype).requires_grad_(), torch.ones(rows, dim).to(dtype)


def of(function, logits, x, grad):
    out = function(logits, x)
    return [out, *torch.autograd.grad(out, (logits, x), grad)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_those_of_float64(dtype):
    logits, x, grad = drawn(37, 50, dtype)
    wide = [each.detach().double().requires_grad_() for each in (logits, x)]
    expected = of(lambda gate, x: gate.sigmoid() * x, *wide, grad.double())
    for mine, theirs in zip(of(ops.row_gate, logits, x, grad), expected):
        assert (mine.double() - theirs).abs().max() < TOLERANCE[dtype] * x.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_in_any_company(dtype):
    logits, x, grad = drawn(601, 250, dtype)
    whole = of(ops.row_gate, logits, x, grad)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 40), slice(599, 601)):
        part = of(ops.row_gate, *(each[rows].detach().requires_grad_() for each in (logits, x)), grad[rows])
        assert all(torch.equal(mine, theirs[rows]) for mine, theirs in zip(part, whole))


def test_a_compiled_graphs_operator_has_the_bits_of_the_eager_one():
    given = drawn(150, 48, torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(ops.row_gate, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, of(ops.row_gate, *given), of(compiled, *given)))
