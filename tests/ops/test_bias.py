"""A projection's bias: one rounding, and a gradient that is summed over rows in one order."""

import pytest
import torch

from lockstep import ops

DTYPES = [torch.float32, torch.bfloat16]


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that cancel: another order of their sum shows."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draw) * torch.exp2(torch.randint(-4, 5, shape, generator=draw).float())
    half = shape[0] // 2
    x[half : 2 * half] = -x[:half] + 1e-3 * x[half : 2 * half]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [5, 16, 50])
def test_a_bias_is_added_with_one_rounding_and_has_the_sum_of_the_gradients(dtype, dim):
    x, bias = drawn(0, 150, dim, dtype=dtype).requires_grad_(), drawn(1, dim, dtype=dtype).requires_grad_()
    grad = drawn(2, 150, dim, dtype=dtype)
    out = ops.add_bias(x, bias)
    grad_x, grad_bias = torch.autograd.grad(out, (x, bias), grad)
    assert torch.equal(out, (x.double() + bias.double()).to(dtype)) and torch.equal(grad_x, grad)
    # 150 terms of up to 50, each sum rounded to float32; then to bfloat16.
    expected, tolerance = grad.double().sum(0), 1e-4 if dtype == torch.float32 else 8e-3 * float(grad_bias.abs().max())
    assert (grad_bias.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_summed_in_slabs_of_64_rows_whatever_the_threads_and_the_padding(form, dtype):
    if form == "pytorch":
        pytest.skip("a library's sums")
    bias, grad = torch.zeros(33, dtype=dtype, requires_grad=True), drawn(0, 300, 33, dtype=dtype)

    def gradient(grad):
        return torch.autograd.grad(ops.add_bias(torch.zeros_like(grad), bias), bias, grad)[0]

    total = torch.zeros(33)
    for slab in grad.float().split(64):
        sums = torch.zeros(33)
        for row in slab:
            sums += row
        total += sums
    assert torch.equal(gradient(grad), total.to(dtype))
    assert torch.equal(gradient(torch.cat((grad, grad.new_zeros(7, 33)))), total.to(dtype))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(gradient(grad), total.to(dtype))
    finally:
        torch.set_num_threads(before)


def test_the_opaque_form_has_the_bits_of_the_eager_one():
    x, bias = drawn(0, 150, 48, dtype=torch.bfloat16), drawn(1, 48, dtype=torch.bfloat16).requires_grad_()
    grad, results = drawn(2, 150, 48, dtype=torch.bfloat16), []
    for function in (ops.add_bias, torch.ops.lockstep.add_bias):
        out = function(x, bias)
        results.append([out, *torch.autograd.grad(out, bias, grad)])
    assert all(map(torch.equal, *results))
