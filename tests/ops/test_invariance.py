"""The promise everything rests on: a row's bits depend on its own sequence and on nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from tests.ops.paging import assert_pieces_agree

DTYPES = [torch.float32, torch.bfloat16]


def _randn(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 33, 250, 512])
def test_norm_activation_and_rotation_of_a_row_are_the_same_in_any_company(dtype, dim):
    x, up, weight = _randn(0, 601, dim, dtype=dtype), _randn(1, 601, dim, dtype=dtype), _randn(2, dim, dtype=dtype)
    heads = _randn(3, 601, 3, 2 * dim, dtype=dtype)
    angles = torch.rand(601, dim, generator=torch.Generator().manual_seed(4)) * 6
    normed, gated = ops.rms_norm(x, weight, 1e-6), ops.silu_mul(x, up)
    rotated = ops.rotary(heads, angles.cos(), angles.sin())
    for rows in (slice(0, 1), slice(7, 8), slice(3, 40), slice(599, 601), slice(0, 601)):
        assert torch.equal(ops.rms_norm(x[rows], weight, 1e-6), normed[rows])
        assert torch.equal(ops.silu_mul(x[rows], up[rows]), gated[rows])
        assert torch.equal(ops.rotary(heads[rows], angles[rows].cos(), angles[rows].sin()), rotated[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 258, 1000])
def test_log_probability_of_a_row_is_the_same_in_any_company(dtype, vocab):
    hidden, head = _randn(0, 77, 64, dtype=dtype), _randn(1, vocab, 64, dtype=dtype)
    targets = torch.arange(77) % vocab
    log_probs, entropy = ops.token_log_probs(hidden, head, targets, 0.7)
    for rows in (slice(0, 1), slice(76, 77), slice(5, 20)):
        alone = ops.token_log_probs(hidden[rows], head, targets[rows], 0.7)
        assert torch.equal(alone[0], log_probs[rows]) and torch.equal(alone[1], entropy[rows])


def test_slicing_of_the_head_does_not_change_log_probabilities(monkeypatch):
    from lockstep.ops import logprobs

    hidden, head, targets = (
        _randn(0, 90, 64, dtype=torch.float32),
        _randn(1, 500, 64, dtype=torch.float32),
        torch.arange(90),
    )
    whole = ops.token_log_probs(hidden, head, targets)
    monkeypatch.setattr(logprobs, "SLICE_BYTES", 4 * 500 * 16)
    sliced = ops.token_log_probs(hidden, head, targets)
    assert torch.equal(whole[0], sliced[0]) and torch.equal(whole[1], sliced[1])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    head_dim=st.sampled_from([32, 64, 96]),
    random=st.randoms(use_true_random=False),
)
def test_attention_is_the_same_however_sequences_are_cut_ordered_and_paged(dtype, lengths, heads, head_dim, random):
    num_heads, kv_heads = heads
    total = sum(lengths)
    q = _randn(0, total, num_heads, head_dim, dtype=dtype)
    k, v = _randn(1, total, kv_heads, head_dim, dtype=dtype), _randn(2, total, kv_heads, head_dim, dtype=dtype)
    expected = ops.PackedAttention(lengths)(0, q, k, v)
    assert_pieces_agree(expected, q, k, v, lengths, random, pieces=[1, 1, 5, 16, 64, 150])


def test_a_draw_depends_on_its_own_row_alone():
    rows, vocab = 40, 300
    logits = _randn(0, rows, vocab, dtype=torch.float32)
    params = (
        torch.full((rows,), 0.8),
        torch.tensor([0, 5, 0, 0] * 10),
        torch.tensor([1.0, 1.0, 0.7, 1.0] * 10),
        torch.tensor([0.0, 0.0, 0.0, 0.1] * 10),
        ops.uniforms(torch.arange(rows), torch.arange(rows)),
    )
    tokens, log_probs = ops.sample(logits, *params)
    for rows_ in (slice(0, 1), slice(5, 6), slice(10, 31)):
        alone = ops.sample(logits[rows_], *(p[rows_] for p in params))
        assert torch.equal(alone[0], tokens[rows_]) and torch.equal(alone[1], log_probs[rows_])
