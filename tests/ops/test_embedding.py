"""The gradient of a table's rows is added in the order of the tokens."""

import torch

from lockstep import ops


def test_the_gradient_of_a_row_is_its_tokens_gradients_added_in_order_for_any_number_of_threads():
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (4000,), generator=draw)
    grad = torch.randn(4000, 96, generator=draw) * 10 ** torch.randn(4000, 1, generator=draw)
    expected = torch.zeros(50, 96)
    for token, row in zip(tokens.tolist(), grad):
        expected[token] += row
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weight = torch.zeros(50, 96, requires_grad=True)
            ops.embedding(tokens, weight).backward(grad)
            assert torch.equal(weight.grad, expected)
    finally:
        torch.set_num_threads(before)
