"""gpt-oss's activation: values and gradients of float64, and the same bits in any company, compiled or not."""

import pytest
import torch

from lockstep import ops
from lockstep.ops import native

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
"""One rounding of the result, and in float32 that of the sigmoid's exponential."""
DTYPES = list(TOLERANCE)


def drawn(rows: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Far beyond the bounds, on them, and around zero."""
    draw = torch.Generator().manual_seed(0)
    gate, up = (
        torch.randn(rows, dim, generator=draw) * 10.0 ** torch.randint(-2, 2, (rows, dim), generator=draw)
        for _ in range(2)
    )
    gate[0, :4], up[1, :4] = torch.tensor([7.0, -7.0, 7.1, -200.0]), torch.tensor([7.0, -7.0, 7.1, -7.1])
    return [x.to(dtype).requires_grad_() for x in (gate, up)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 50])
def test_values_and_gradients_are_those_of_float64(dtype, dim):
    gate, up = drawn(33, dim, dtype)
    grad = torch.randn(33, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = ops.clamped_swiglu(gate, up)
    ours = [out, *torch.autograd.grad(out, (gate, up), grad)]
    exact = [x.detach().double().requires_grad_() for x in (gate, up)]
    # Not `clamp`, whose gradient on a bound depends on the version of torch.
    bounded = torch.where(exact[0] > 7.0, 7.0, exact[0])
    factor = torch.where(exact[1].abs() > 7.0, 7.0 * exact[1].sign(), exact[1])
    expected = (factor + 1) * bounded * torch.sigmoid(1.702 * bounded)
    theirs = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    for mine, reference in zip(ours, theirs):
        assert mine.dtype == dtype
        # Below e^-87 the exponential is zero: what is left of such a gate is below 1e-30.
        assert ((mine.double() - reference).abs() <= TOLERANCE[dtype] * reference.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_on_a_bound_has_the_gradient_of_one_within_it(dtype):
    # The sigmoid of 1.702 * 7 is 1 within both roundings: of `(up + 1) gate`, the gradients are up + 1 and the gate.
    gate = torch.tensor([7.0, 7.0625, 7.0, 7.0, 7.0, 7.0]).to(dtype).requires_grad_()
    up = torch.tensor([1.0, 1.0, 7.0, -7.0, 7.0625, -7.0625]).to(dtype).requires_grad_()
    of_gate, of_up = torch.autograd.grad(ops.clamped_swiglu(gate[None], up[None]).sum(), (gate, up))
    torch.testing.assert_close(of_gate.float(), torch.tensor([2.0, 0.0, 8.0, -6.0, 8.0, -6.0]), rtol=8e-3, atol=0)
    torch.testing.assert_close(of_up.float(), torch.tensor([7.0, 7.0, 7.0, 7.0, 0.0, 0.0]), rtol=8e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [33, 250, 512])
def test_a_row_is_the_same_in_any_company(dtype, dim):
    gate, up = (x.detach() for x in drawn(601, dim, dtype))
    whole = ops.clamped_swiglu(gate, up)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 40), slice(599, 601)):
        assert torch.equal(ops.clamped_swiglu(gate[rows], up[rows]), whole[rows])
    # Columns of one product, as an expert's are.
    both = torch.stack((gate, up), -1)
    assert torch.equal(ops.clamped_swiglu(both[..., 0], both[..., 1]), whole)


@pytest.mark.parametrize("broken", range(2))
def test_what_is_no_number_stays_none(broken):
    arguments = [torch.ones(3, 16), torch.ones(3, 16)]
    arguments[broken][1, 3] = torch.nan
    out = ops.clamped_swiglu(*arguments)
    assert out.isnan().nonzero().tolist() == [[1, 3]]


def test_the_opaque_form_has_the_bits_of_the_eager_one(form):
    gate, up = drawn(9, 48, torch.bfloat16)
    grad = torch.randn(9, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for function in (ops.clamped_swiglu, torch.ops.lockstep.clamped_swiglu):
        out = function(gate, up)
        results.append([out, *torch.autograd.grad(out, (gate, up), grad)])
    assert all(map(torch.equal, *results))
    assert native.instruction_set() == form
