"""Attention whose keys are its values: the bits of attention with two copies of them, in half of the cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from tests.ops.paging import assert_pieces_agree
from tests.ops.test_linear import cancelling

DTYPES = [torch.float32, torch.bfloat16]
TERMS = ops.Terms(scale=0.11)


def _queries_and_keys(dtype, tokens, heads, width):
    """Each query's scores with all keys cancel."""
    q, k = cancelling(0, tokens * heads, width, tokens, dtype)
    return q.view(tokens, heads, width), k[:, None] / 8


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    heads=st.sampled_from([1, 4, 12, 50]),
    width=st.sampled_from([16, 40, 48, 96]),
    random=st.randoms(use_true_random=False),
)
def test_rows_have_the_bits_of_attention_over_a_copy_however_they_come(dtype, lengths, heads, width, random):
    q, k = _queries_and_keys(dtype, sum(lengths), heads, width)
    expected = ops.PackedAttention(lengths)(0, q, k, k.clone(), TERMS)
    assert torch.equal(ops.PackedAttention(lengths)(0, q, k, None, TERMS), expected)
    assert_pieces_agree(expected, q, k, None, lengths, random, pieces=[1, 1, 5, 16, 64, 150], terms=TERMS)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_the_keys_is_that_of_keys_and_values(dtype, shared):
    q, k = _queries_and_keys(dtype, 130, 4, 48)
    attention = ops.SharedPrefixAttention([70, 100], [0, 40]) if shared else ops.PackedAttention([70, 60])
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, k)]
    apart = torch.autograd.grad(attention(0, *leaves, TERMS), leaves, grad)
    own = torch.autograd.grad(attention(0, *leaves[:2], None, TERMS), leaves[:2], grad)
    assert torch.equal(own[0], apart[0])
    both = apart[1].float() + apart[2].float()
    # Of their sum in bfloat16 three roundings less.
    atol = 1e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(own[1].float(), both, rtol=atol, atol=atol * float(both.abs().max()))


@pytest.mark.parametrize("heads", [1, 12])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_token_breaks_those_that_see_it_and_changes_no_bit_of_others(dtype, broken, heads):
    q, k = _queries_and_keys(dtype, 130, heads, 48)
    expected = ops.PackedAttention([70, 60])(0, q, k, None)
    k[22, 0, 5] = broken  # between tokens whose rows share a tile with its own
    out = ops.PackedAttention([70, 60])(0, q, k, None)
    others = torch.ones(130, dtype=torch.bool)
    others[22:70] = False
    assert torch.equal(out[others], expected[others]) and out[22:70].isnan().all()


def test_the_cache_holds_keys_alone():
    both, alone = (ops.KVCache(2, 8, 1, 48, torch.bfloat16, values=values) for values in (True, False))
    assert alone.nbytes * 2 == both.nbytes and [t.shape for t in alone.tensors()] == [both.keys.shape]
