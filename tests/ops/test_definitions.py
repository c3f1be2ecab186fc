"""bfloat16 in pairs and in tiles is what Intel's instructions are defined to be, with or without the instructions."""

from functools import partial

import pytest
import torch

from lockstep import ops
from lockstep.ops import native
from lockstep.ops.attention_gradient import Attended
from lockstep.ops.linear import product_sums
from tests.ops import attention_checks, definitions
from tests.ops.definitions import add_pairs, add_tiles

TERMS = {
    "plain": ops.Terms(),
    "window": ops.Terms(scale=0.3, window=37),
    "sinks": ops.Terms(window=70, sinks=torch.tensor([2.0, -3.0, 0.5, 9.0])),
}


cancelling = partial(attention_checks.cancelling, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def add(form):
    """How one product is added to a sum."""
    arithmetic = native.arithmetic()
    if arithmetic not in ("bf16_pairs", "bf16_tiles"):
        pytest.skip("float32 chains")
    return add_tiles if arithmetic == "bf16_tiles" else add_pairs


@pytest.fixture(scope="module")
def tiles(form):
    if native.arithmetic() != "bf16_tiles":
        pytest.skip("only a matrix unit multiplies tiles")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tokens", "terms"),
    [
        (2, 1, 32, 1, "plain"), (3, 1, 64, 31, "window"), (4, 4, 32, 100, "sinks"), (2, 1, 48, 150, "plain"),
        (4, 4, 32, 150, "window"), (3, 1, 64, 100, "sinks"),
    ],
)  # fmt: skip
def test_attention_and_its_gradients_are_what_defines_them(add, heads, kv_heads, head_dim, tokens, terms):
    by_tiles = add is add_tiles and head_dim % 32 == 0
    add = add_tiles if by_tiles else add_pairs
    q, grad = cancelling(0, tokens, heads, head_dim), cancelling(1, tokens, heads, head_dim)
    k, v = cancelling(2, tokens, kv_heads, head_dim), cancelling(3, tokens, kv_heads, head_dim)
    attention, terms = ops.PackedAttention([tokens]), TERMS[terms]
    terms = terms._replace(sinks=None if terms.sinks is None else terms.sinks[:heads].bfloat16())
    out, log_sums = attention.forward(q, k, v, terms)
    expected_out, expected_sums = definitions.attention(q, k, v, add, terms)
    assert torch.equal(log_sums, expected_sums) and torch.equal(out, expected_out)
    ours = attention.backward(grad, Attended(q, k, v, out, log_sums), terms)
    at_once = 32 if by_tiles else 2
    theirs = definitions.attention_gradients(grad, q, k, v, out, log_sums, add, at_once, terms)
    for name, own, expected in zip("qkv", ours, theirs):
        assert torch.equal(own, expected), f"the gradient of {name}"


@pytest.mark.parametrize("thread_flushes", [False, True])
def test_what_is_too_small_for_a_normal_float_is_taken_as_zero_whatever_the_thread_says(add, thread_flushes):
    # Steps of one chain: element 0, then the element that either definition takes after it.
    second = 2 if add is add_tiles else 3
    x, w = torch.zeros(7, 64), torch.full((3, 64), 2.0**-63)
    x[0] = 2.0**-67  # 64 products of 2^-130, whose sum is a normal float
    x[1, 0] = 2.0**-126
    x[2, 0], x[2, second] = 2.0**-63, -(2.0**-87)  # 2^-126 - 2^-150, which has to be rounded to less than 2^-126
    x[3, 0], x[3, second] = 2.0**-63, -(2.0**-88)  # 2^-126 - 2^-151, which is rounded to 2^-126
    x[4, 0], x[4, second] = 2.0**-63, 2.0**-66
    x[5, 0] = 2.0**-130  # a factor
    w[2] = 2.0**100
    expected = torch.zeros(7, 3)
    expected[3, :2], expected[4, :2] = 2.0**-126, 2.0**-126 + 2.0**-129
    expected[0, 2] = 2.0**39
    expected[1, 2] = 2.0**-26
    expected[2, 2], expected[3, 2], expected[4, 2] = 2.0**37 - 2.0**13, 2.0**37 - 2.0**12, 2.0**37 + 2.0**34
    if not torch.set_flush_denormal(thread_flushes):
        pytest.skip("this processor has no such setting")
    try:
        sums = product_sums(x.bfloat16(), w.bfloat16())
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(sums, expected)


def test_gradients_of_scores_that_are_too_small_for_a_normal_float_are_rounded_to_zero(add):
    """Two keys of weight ½: head 53's score has the gradient 0.9999 · 2^-126, the next one's 1.0054 · 2^-126."""
    q, k, v, grad = (torch.zeros(2, heads, 32) for heads in (96, 1, 1, 96))
    k[1], v[1, 0, 0] = 2.0**100, 2.0**-62
    grad[1, :, 0] = 2.0**-60 * (1 + torch.arange(96) / 128)
    q, k, v, grad = (x.bfloat16() for x in (q, k, v, grad))
    attention = ops.PackedAttention([2])
    out, log_sums = attention.forward(q, k, v)
    ours = attention.backward(grad, Attended(q, k, v, out, log_sums))
    theirs = definitions.attention_gradients(grad, q, k, v, out, log_sums, add, 32)
    assert all(map(torch.equal, ours, theirs))
    assert not ours[0][1, 53].any() and ours[0][1, 54].all()


def test_infinities_and_what_is_no_number_come_out_as_of_one_step_after_the_other(tiles):
    inf, nan = torch.inf, torch.nan
    x, w = torch.zeros(6, 64), torch.ones(1, 64)
    w[0, :5] = 2.0**64
    x[0, 0], x[0, 2] = -(2.0**63), 2.0**64  # the second product is 2^128, the sum 2^127
    x[1, 0], x[1, 2] = 2.0**64, -(2.0**63)
    x[2, 7], x[3, 7] = -inf, nan
    x[4, 7], x[4, 39] = inf, -inf
    x[5, 9] = inf
    w[0, 9] = 0
    sums = product_sums(x.bfloat16(), w.bfloat16())[:, 0]
    assert torch.equal(sums[:3], torch.tensor([2.0**127, inf, -inf])) and sums[3:].isnan().all()


def test_the_matrix_unit_is_given_back(tiles):
    q, k, v = (cancelling(i, 40, 2, 32).requires_grad_() for i in range(3))
    held = native.function("holds_unit")
    ops.linear(q[:, 0], k[:, 0])
    assert not held(), "after a product"
    out = ops.PackedAttention([40])(0, q, k, v)
    assert not held(), "after attention"
    out.float().sum().backward()
    assert not held(), "after its gradient"
