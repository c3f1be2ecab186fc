"""Products with a weight of each head's own: those of `linear`, head by head, whatever the other rows and heads."""

import pytest
import torch

from lockstep import ops
from tests.ops.test_linear import cancelling

DTYPES = [torch.float32, torch.bfloat16]
HEADS, ROWS, FIRST, STOP = 3, 40, 6, 22
"""Each head has 40 rows of the weight, of which a product takes those from 6 to 22."""


def _factors(dtype, across, tokens=70):
    """`x` [tokens, heads, in] and `weight` [heads · 40, 24], whose products cancel."""
    width, weight = 24, torch.randn(HEADS, ROWS, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = []
    for head in range(HEADS):
        x, own = cancelling(head, tokens, STOP - FIRST if across else width, width if across else STOP - FIRST, dtype)
        weight[head, FIRST:STOP] = own.T if across else own
        parts.append(x)
    return torch.stack(parts, 1), weight.flatten(0, 1)


def _alone(x, weight, across):
    """The definition: each head's product by itself."""
    parts = weight.view(HEADS, ROWS, -1)[:, FIRST:STOP]
    parts = parts.mT if across else parts
    return torch.stack([ops.linear(x[:, head].contiguous(), part.contiguous()) for head, part in enumerate(parts)], 1)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_heads_product_is_that_of_its_part_alone_for_any_number_of_rows(dtype, across):
    x, weight = _factors(dtype, across)
    expected = _alone(x, weight, across)
    assert expected.abs().max() > 0
    for rows in (slice(0, 70), slice(0, 1), slice(5, 13), slice(69, 70)):
        assert torch.equal(ops.head_linear(x[rows], weight, FIRST, STOP, across), expected[rows])


@pytest.mark.parametrize("across", [False, True])
def test_gradients_are_those_of_the_products_alone(across):
    x, weight = _factors(torch.float32, across)
    grads = []
    for product in (lambda x, w: ops.head_linear(x, w, FIRST, STOP, across), lambda x, w: _alone(x, w, across)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = product(*leaves)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
        grads.append([leaf.grad for leaf in leaves])
    for own, other in zip(*grads):
        # In the plain form a library's products, whose bits are its own.
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-4)
    rows = grads[0][1].view(HEADS, ROWS, -1)
    assert not rows[:, :FIRST].any() and not rows[:, STOP:].any() and rows[:, FIRST:STOP].any()


def test_a_compiled_graph_calls_it_as_a_whole():
    x, weight = _factors(torch.float32, True)
    compiled = torch.compile(
        lambda x, w: ops.head_linear(x * 1.0, w, FIRST, STOP, True), backend="aot_eager", fullgraph=True
    )
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = compiled(*leaves)
    assert torch.equal(out, _alone(x, weight, True))
    out.sum().backward()
    assert leaves[0].grad.shape == x.shape and leaves[1].grad.shape == weight.shape
