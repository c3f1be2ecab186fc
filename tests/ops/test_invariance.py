"""The promise everything rests on: a row's bits depend on its own sequence and on nothing else."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops.cuts import cut
from lockstep.ops.parts import Whole
from lockstep.ops.temperature import inverse_temperature
from tests.ops.paging import assert_only_those_who_see_it_break, assert_pieces_agree

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
    from lockstep.ops import head_gradients

    hidden, head, targets = (
        _randn(0, 90, 64, dtype=torch.float32),
        _randn(1, 500, 64, dtype=torch.float32),
        torch.arange(90),
    )
    whole = ops.token_log_probs(hidden, head, targets)
    monkeypatch.setattr(head_gradients, "SLICE_BYTES", 4 * 500 * 16)
    sliced = ops.token_log_probs(hidden, head, targets)
    assert torch.equal(whole[0], sliced[0]) and torch.equal(whole[1], sliced[1])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    head_dim=st.sampled_from([8, 16, 32, 40, 48, 64, 80, 96]),
    random=st.randoms(use_true_random=False),
)
def test_attention_is_the_same_however_sequences_are_cut_ordered_and_paged(dtype, lengths, heads, head_dim, random):
    num_heads, kv_heads = heads
    total = sum(lengths)
    q = _randn(0, total, num_heads, head_dim, dtype=dtype)
    k, v = _randn(1, total, kv_heads, head_dim, dtype=dtype), _randn(2, total, kv_heads, head_dim, dtype=dtype)
    expected = ops.PackedAttention(lengths)(0, q, k, v)
    assert_pieces_agree(expected, q, k, v, lengths, random, pieces=[1, 1, 5, 16, 64, 150])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_token_breaks_those_that_see_it_and_changes_no_bit_of_others(dtype, part, broken):
    assert_only_those_who_see_it_break(dtype, part, broken)


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
    drawn = ops.sample(logits, *params)
    for rows_ in (slice(0, 1), slice(5, 6), slice(10, 31)):
        alone = ops.sample(logits[rows_], *(p[rows_] for p in params))
        assert all(torch.equal(own, each[rows_]) for own, each in zip(alone, drawn, strict=True))


def test_a_row_that_is_not_finite_shows_it_and_changes_no_other():
    vocab = 40
    logits = _randn(0, 8, vocab, dtype=torch.float32)
    logits[1, 3], logits[2, 30], logits[6, 7] = torch.nan, torch.inf, torch.nan
    logits[3] = -torch.inf
    logits[4], logits[4, 11] = -torch.inf, torch.nan
    logits[6, :7] = logits[6, 8:20] = -torch.inf  # a NaN whose piece of the vocabulary is empty else
    temperature = torch.tensor([0.0, 0.8, 0.8, 0.8, 0.0, 0.8, 1.0, 1.0])
    top_k, top_p = torch.tensor([0, 5, 0, 0, 0, 5, 0, 2]), torch.tensor([1.0, 1.0, 0.7, 1.0, 1.0, 0.7, 0.5, 1.0])
    params = temperature, top_k, top_p, torch.zeros(8), ops.uniforms(torch.arange(8), torch.arange(8))
    tokens, log_probs, _ = drawn = ops.sample(logits, *params)
    assert log_probs.isfinite().tolist() == [True, False, False, False, False, True, False, True]
    assert (tokens >= 0).all() and (tokens < vocab).all()
    whole = [0, 5, 7]
    alone = ops.sample(logits[whole], *(p[whole] for p in params))
    assert all(torch.equal(own, each[whole]) for own, each in zip(alone, drawn, strict=True))


def test_the_lowest_temperature_draws_the_likeliest_token_where_it_is_clearly_so():
    logits = _randn(0, 300, 200, dtype=torch.float32) * 30 + 1000
    likeliest = logits.argmax(-1)
    logits[torch.arange(300), likeliest] += 1.0
    off = torch.zeros(300, dtype=torch.int64), torch.ones(300), torch.zeros(300)
    for temperature in (0.01, 0.1):
        uniform = ops.uniforms(torch.arange(300), torch.arange(300))
        tokens, log_probs, drawn_with = ops.sample(logits, torch.full((300,), temperature), *off, uniform)
        assert torch.equal(drawn_with, log_probs)
        assert torch.equal(tokens, likeliest) or temperature == 0.1
        assert (log_probs <= 0).all() and (log_probs[tokens == likeliest] > -0.01).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_cuts_keep_the_tokens_that_the_processors_of_transformers_keep(seed):
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    draw, vocab = random.Random(seed), 50
    logits = _randn(seed, 50, vocab, dtype=torch.float32) * draw.choice([0.5, 2, 6])
    top_k = [draw.choice([0, 0, 1, 2, 5, 20, 49, 50, 400]) for _ in range(50)]
    top_p = [draw.choice([1.0, 1.0, draw.uniform(0.05, 0.999)]) for _ in range(50)]
    min_p = [draw.choice([0.0, 0.0, draw.uniform(0.001, 0.9)]) for _ in range(50)]
    temperature = torch.tensor([draw.choice([0.3, 1.0, 1.7]) for _ in range(50)])
    inverse = inverse_temperature(temperature)
    cuts = torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)
    kept = cut(logits, inverse, *cuts, torch.ones(50, dtype=torch.bool), Whole(vocab)).isfinite()
    for row in range(50):
        theirs = logits[row : row + 1] * inverse[row]
        warpers = [TopKLogitsWarper(top_k[row])] if top_k[row] else []
        warpers += [TopPLogitsWarper(top_p[row])] if top_p[row] < 1 else []
        warpers += [MinPLogitsWarper(min_p[row])] if min_p[row] else []
        for warper in warpers:
            theirs = warper(None, theirs)
        assert torch.equal(theirs.isfinite()[0], kept[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_cuts_of_a_large_vocabulary_are_those_of_sorting_it(dtype, spread):
    rows, vocab = 40, 5003
    logits = (_randn(3, rows, vocab, dtype=torch.float32) * spread).to(dtype)  # in bfloat16 with many equal ones
    logits[5, 100:] = logits[6, ::2] = -torch.inf
    logits[7, 9] = torch.nan
    draw = random.Random(1)
    top_k = torch.tensor([draw.choice([0, 1, 2, 50, 300, 4999, 5003, 9999]) for _ in range(rows)])
    top_p = torch.tensor([draw.choice([1.0, draw.uniform(0.01, 0.999)]) for _ in range(rows)])
    min_p = torch.tensor([draw.choice([0.0, draw.uniform(0.001, 0.9)]) for _ in range(rows)])
    asked = torch.tensor([draw.random() < 0.9 for _ in range(rows)])
    arguments = logits, inverse_temperature(torch.full((rows,), 0.7)), top_k, top_p, min_p, asked
    found = cut(*arguments, Whole(vocab))
    expected = cut_by_sorting(*arguments[:-1], asked & (torch.arange(rows) != 7))
    assert torch.equal(found.nan_to_num(1e9), expected.nan_to_num(1e9))
    alone = [cut(*(x[r : r + 1] for x in arguments), Whole(vocab)) for r in range(rows)]
    assert torch.equal(torch.cat(alone).nan_to_num(1e9), found.nan_to_num(1e9)), "whatever other rows there are"


def cut_by_sorting(logits, inverse, top_k, top_p, min_p, asked):
    """Sorts the vocabulary and adds weights in that order, in float64."""
    ordered, order = logits.float().sort(dim=-1, descending=True, stable=True)
    scaled = ordered * inverse[:, None]
    weights = (scaled.double() - scaled[:, :1].double()).exp()
    sums, place = weights.cumsum(-1), torch.arange(logits.shape[1])
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    kept = sums.gather(1, (limit - 1).clamp(max=logits.shape[1] - 1))
    out = (place >= limit) | ((top_p[:, None] < 1) & (sums - weights >= top_p[:, None] * kept))
    out |= weights < min_p[:, None] * weights[:, :1]
    out &= asked[:, None]
    out[:, 0] = False
    return logits.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([5, 258, 1031]), spread=st.sampled_from([1e-3, 1.0, 6.0]))
def test_a_token_has_its_log_probability_among_those_that_the_cuts_left(dtype, seed, vocab, spread):
    """log p − log Σ p of the tokens left, in float64, of rows with and without cuts side by side."""
    draw, rows = random.Random(seed), 24
    logits = (_randn(seed, rows, vocab, dtype=torch.float32) * spread + draw.choice([0, 1000, -1000])).to(dtype)
    logits[3, : vocab // 2] = -torch.inf
    temperature = torch.tensor([draw.choice([0.0, 0.3, 1.0, 1.7]) for _ in range(rows)])
    top_k = torch.tensor([draw.choice([0, 0, 1, 2, vocab // 2, vocab, vocab + 9]) for _ in range(rows)])
    top_p = torch.tensor([draw.choice([1.0, 1.0, 1e-6, draw.uniform(0.05, 0.999)]) for _ in range(rows)])
    min_p = torch.tensor([draw.choice([0.0, 0.0, draw.uniform(0.001, 0.9)]) for _ in range(rows)])
    uniform = ops.uniforms(torch.arange(rows) + seed, torch.arange(rows))
    params = temperature, top_k, top_p, min_p, uniform
    tokens, log_probs, drawn_with = ops.sample(logits, *params)

    inverse = inverse_temperature(temperature)
    asked = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    kept = cut(logits, inverse, top_k, top_p, min_p, asked, Whole(vocab)).isfinite()
    scaled = logits.double() * inverse.double()[:, None]
    expected = torch.log_softmax(scaled.masked_fill(~kept, -torch.inf), -1).gather(1, tokens[:, None])[:, 0]
    # Logits / temperature are rounded to float32, 6e-8 of numbers up to 3400, and so are sums of a thousand weights.
    torch.testing.assert_close(drawn_with.double(), expected, rtol=0, atol=1e-3 if logits.abs().max() > 500 else 2e-5)
    assert kept.gather(1, tokens[:, None]).all() and (drawn_with <= 0).all()
    whole = ~asked | (kept.sum(1) == logits.isfinite().sum(1))
    assert torch.equal(drawn_with[whole], log_probs[whole])
    assert (drawn_with[kept.sum(1) == 1] == 0).all(), "what could not be otherwise"
    order = torch.tensor(draw.sample(range(rows), rows))
    for company in (order, order[:1], order[5:12]):
        again = ops.sample(logits[company], *(p[company] for p in params))
        assert all(torch.equal(own, each[company]) for own, each in zip(again, (tokens, log_probs, drawn_with)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_tokens_a_cut_and_the_likeliest_take_the_lower_ones(dtype):
    logits = torch.tensor([1.0, 3.0, 0.0, 3.0, 2.0, -0.0, 3.0, 1.0, 0.0, -torch.inf] * 40).to(dtype)[None]
    logits[0, :5] -= 8
    order = sorted(range(400), key=lambda token: (-logits[0, token].item(), token))
    one, weights = torch.ones(1), logits.double().exp()[0]
    share = (weights[order[:150]].sum() - 1e-3) / weights.sum()
    first = [(n, 1.0, n) for n in (1, 2, 100, 119, 200, 300, 360)]
    for top_k, top_p, count in [*first, (0, share, 150), (200, 0.01, 2)]:
        params = torch.tensor([top_k]), one.double() * top_p, torch.zeros(1), torch.tensor([True]), Whole(400)
        kept = cut(logits, one, *params)[0].isfinite().nonzero()[:, 0]
        assert kept.tolist() == sorted(order[:count])
    for count in (1, 5, 130, 257, 400):
        assert [token for token, _ in ops.top_log_probs(logits, one, [count])[0]] == order[:count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_have_the_log_probabilities_that_a_draw_of_them_has(dtype):
    logits, temperature = (_randn(5, 6, 300, dtype=torch.float32) * 4).to(dtype), torch.full((6,), 0.85)
    tops = ops.top_log_probs(logits, temperature, [3, 0, 20, 300, 400, 1])
    assert [len(top) for top in tops] == [3, 0, 20, 300, 300, 1]
    for row, top in enumerate(tops):
        tokens = torch.tensor([token for token, _ in top], dtype=torch.int64)
        inverse = inverse_temperature(temperature[:1]).repeat(len(top))
        scores = ops.logits_log_probs(logits[row].expand(len(top), -1), tokens, inverse)[0]
        assert [score for _, score in top] == scores.tolist() == sorted(scores.tolist(), reverse=True)


def test_top_p_counts_from_what_top_k_leaves():
    # Of .4 and .35, the first alone is more than half: of all, .5 takes both.
    logits = torch.tensor([[0.4, 0.35, 0.25]]).log()
    one = torch.ones(1)
    cuts = torch.tensor([2]), one * 0.5, torch.zeros(1), torch.tensor([True])
    assert cut(logits, one, *cuts, Whole(3)).isfinite().tolist() == [[True, False, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_uniform_number_of_zero_draws_no_token_that_was_cut(dtype):
    # A piece of the vocabulary whose weight is above 0, but below what a sum of weights counts in.
    logits = torch.full((1, 16), -60.0, dtype=dtype)
    logits[0, [3, 8, 15]] = torch.tensor([53.75, 12.1875, 97.5], dtype=dtype)
    one, none = torch.ones(1), torch.zeros(1)
    token, log_prob, cut = ops.sample(logits, one, torch.tensor([3]), one, none, none.double())
    assert token.item() in (3, 8, 15) and log_prob.isfinite() and cut.isfinite()
