"""Log-probabilities, draws and cuts: those of float64, and the same bits whatever other rows there are."""

import random
from importlib import import_module

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from lockstep import ops
from lockstep.ops import head_gradients, native
from lockstep.ops.cuts import cut
from lockstep.ops.vocabulary import Whole

FLOAT, HALF = torch.float32, torch.bfloat16
DTYPES = [FLOAT, HALF]
# One rounding of the result to its dtype, plus sums of up to 64 products that float32 rounds one by one.
TOLERANCE = {FLOAT: 2e-5, HALF: 2e-2}


def _randn(seed: int, *shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _leaf(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return _randn(seed, *shape, dtype=dtype).requires_grad_()


def _agree(ours: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    for mine, theirs in zip(ours, expected):
        error = (mine.double() - theirs).abs().max() / theirs.abs().max()
        assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize(
    ("dtype", "vocab", "share"), [(FLOAT, 5, 1.0), (HALF, 258, 0.0), (FLOAT, 2050, 0.0), (HALF, 2050, 1.0)]
)
def test_log_probabilities_entropies_and_their_gradients_are_those_of_float64(dtype, vocab, share):
    hidden, head = _leaf(0, 50, 64, dtype=dtype), _leaf(1, vocab, 64, dtype=dtype)
    targets = torch.randint(vocab, (50,), generator=torch.Generator().manual_seed(2))
    grad, entropy_grad = torch.randn(2, 50, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1.0], [share]])
    log_probs, entropy = ops.token_log_probs(hidden, head, targets, 1.3)
    kept = [log_probs] if share == 0 else [log_probs, entropy]
    torch.autograd.backward(kept, [grad, entropy_grad][: len(kept)])

    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
    table = torch.log_softmax(exact[0] @ exact[1].T / 1.3, -1)
    expected = table.gather(1, targets[:, None])[:, 0]
    entropies = -(table.exp() * table).sum(-1)
    torch.autograd.backward([expected, entropies], [grad.double(), entropy_grad.double()])
    ours, theirs = [log_probs, entropy, hidden.grad, head.grad], [expected, entropies, *(x.grad for x in exact)]
    _agree([x.detach() for x in ours], [x.detach() for x in theirs], dtype)
    assert log_probs.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "vocab"), [(FLOAT, 7), (HALF, 258), (FLOAT, 1000)])
def test_log_probability_of_a_row_is_the_same_in_any_company(monkeypatch, dtype, vocab):
    hidden, head = _randn(0, 77, 64, dtype=dtype), _randn(1, vocab, 64, dtype=dtype)
    targets = torch.arange(77) % vocab
    log_probs, entropy = ops.token_log_probs(hidden, head, targets, 0.7)
    for rows in (slice(0, 1), slice(76, 77), slice(5, 20)):
        alone = ops.token_log_probs(hidden[rows], head, targets[rows], 0.7)
        assert torch.equal(alone[0], log_probs[rows]) and torch.equal(alone[1], entropy[rows])
    monkeypatch.setattr(head_gradients, "SLICE_BYTES", 4 * vocab * 16)
    sliced = ops.token_log_probs(hidden, head, targets, 0.7)
    assert torch.equal(sliced[0], log_probs) and torch.equal(sliced[1], entropy), "in slices of rows"


def test_kept_logits_give_the_gradients_of_recomputed_ones():
    hidden, head = _leaf(0, 50, 64, dtype=HALF), _leaf(1, 258, 64, dtype=HALF)
    targets = torch.randint(258, (50,), generator=torch.Generator().manual_seed(2))
    log_probs, entropies = ops.token_log_probs(hidden, head, targets, 0.7)
    value = (log_probs.square() + entropies).sum()
    first, second = (torch.autograd.grad(value, (hidden, head), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second)), "the second backward pass recomputes the logits"


@pytest.mark.parametrize(("dtype", "slice_bytes"), [(FLOAT, 1 << 27), (HALF, 4096)])
def test_the_summed_log_probability_is_that_of_the_tokens(dtype, slice_bytes, monkeypatch):
    monkeypatch.setattr(head_gradients, "SLICE_BYTES", slice_bytes)
    targets = torch.randint(258, (50,), generator=torch.Generator().manual_seed(2))
    values, gradients = [], []
    for summed in (True, False):
        hidden, head = _leaf(0, 50, 64, dtype=dtype), _leaf(1, 258, 64, dtype=dtype)
        if summed:
            value = ops.log_prob_sum(hidden, head, targets, -0.02)
        else:
            value = ops.total(ops.token_log_probs(hidden, head, targets)[0]) * -0.02
        (value * 3.0).backward()
        values.append(value)
        gradients.append([hidden.grad.double(), head.grad.double()])
    assert torch.equal(*values)
    with torch.no_grad():
        assert torch.equal(ops.log_prob_sum(hidden, head, targets, -0.02), values[0])
    _agree(gradients[0], gradients[1], dtype)


@pytest.mark.parametrize(
    "score", [lambda *x: ops.token_log_probs(*x)[0].sum(), lambda *x: ops.log_prob_sum(*x, 0.5)], ids=["tokens", "sum"]
)
def test_of_the_heads_gradient_a_wide_sum_and_one_narrow_tensor_are_held_at_once(score, monkeypatch, form):
    if form != "pytorch":
        pytest.skip("in other forms, too, a GPU's products stand in for those of the form")
    monkeypatch.setattr(head_gradients, "SLICE_BYTES", 8 * 4096 * 2)  # three slices of the targets
    # Products that hold nothing wide of their own, as a GPU's.
    products = import_module("lockstep.ops.linear")
    for owner, name in ((products, "product"), (products._linear, "forward")):
        monkeypatch.setattr(owner, name, lambda x, weight, chunks=1: x @ weight.T)
    head, hidden = _leaf(0, 4096, 512, dtype=torch.bfloat16), _leaf(1, 24, 512, dtype=torch.bfloat16)
    with MemTracker() as tracker:
        score(hidden, head, torch.zeros(24, dtype=torch.int64)).backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    # With the head itself four times its size; logits and hidden states are a few hundredths of it.
    assert 3.9 < peak["Total"] / head.nbytes < 4.1


def test_a_loss_under_fake_tensors_leaves_nothing_behind_for_a_real_one():
    def loss():
        # A vocabulary of its own, which nothing has been computed with before.
        return ops.token_log_probs(torch.ones(3, 16), torch.ones(1021, 16), torch.arange(3))[0]

    with FakeTensorMode(), native.pretending():
        loss()
    assert torch.isfinite(loss()).all()


HIDDEN, HEAD = _randn(0, 24, 16) * 3, _randn(1, 40, 16)


@settings(max_examples=24)
@example(0.0)
@given(st.floats(0.01, 10.0) | st.integers(1, 300).map(lambda hundredths: hundredths / 100))
def test_trainer_and_generator_agree_at_any_temperature(temperature):
    """Both sides' log-probabilities, as the engine and the loss compute them."""
    logits = ops.linear(HIDDEN, HEAD)
    rows = torch.full((24,), temperature, dtype=torch.float32)
    tokens, generator = ops.draw(logits, rows, ops.uniforms(torch.arange(24), torch.arange(24)))
    trainer, _ = ops.token_log_probs(HIDDEN, HEAD, tokens, temperature)
    assert torch.equal(generator, trainer)


def test_a_row_that_is_not_finite_shows_it_and_changes_no_other():
    vocab = 40
    logits = _randn(0, 8, vocab)
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


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_cuts_keep_the_tokens_that_the_processors_of_transformers_keep(seed):
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    draw, vocab = random.Random(seed), 50
    logits = _randn(seed, 50, vocab) * draw.choice([0.5, 2, 6])
    top_k = [draw.choice([0, 0, 1, 2, 5, 20, 49, 50, 400]) for _ in range(50)]
    top_p = [draw.choice([1.0, 1.0, draw.uniform(0.05, 0.999)]) for _ in range(50)]
    min_p = [draw.choice([0.0, 0.0, draw.uniform(0.001, 0.9)]) for _ in range(50)]
    temperature = torch.tensor([draw.choice([0.3, 1.0, 1.7]) for _ in range(50)])
    inverse = ops.inverse_temperature(temperature)
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


@pytest.mark.parametrize(("dtype", "spread"), [(HALF, 0.01), (FLOAT, 1.0), (HALF, 8.0)])
def test_cuts_of_a_large_vocabulary_are_those_of_sorting_it(dtype, spread):
    rows, vocab = 40, 5003
    logits = (_randn(3, rows, vocab) * spread).to(dtype)  # in bfloat16 with many equal ones
    logits[5, 100:] = logits[6, ::2] = -torch.inf
    logits[7, 9] = torch.nan
    draw = random.Random(1)
    top_k = torch.tensor([draw.choice([0, 1, 2, 50, 300, 4999, 5003, 9999]) for _ in range(rows)])
    top_p = torch.tensor([draw.choice([1.0, draw.uniform(0.01, 0.999)]) for _ in range(rows)])
    min_p = torch.tensor([draw.choice([0.0, draw.uniform(0.001, 0.9)]) for _ in range(rows)])
    asked = torch.tensor([draw.random() < 0.9 for _ in range(rows)])
    arguments = logits, ops.inverse_temperature(torch.full((rows,), 0.7)), top_k, top_p, min_p, asked
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


@settings(max_examples=10)
@given(
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([5, 258, 1031]),
    spread=st.sampled_from([1e-3, 1.0, 6.0]),
)
def test_a_token_has_its_log_probability_among_those_that_the_cuts_left(dtype, seed, vocab, spread):
    """log p − log Σ p of the tokens left, in float64, of rows with and without cuts side by side."""
    draw, rows = random.Random(seed), 24
    logits = (_randn(seed, rows, vocab) * spread + draw.choice([0, 1000, -1000])).to(dtype)
    logits[3, : vocab // 2] = -torch.inf
    temperature = torch.tensor([draw.choice([0.0, 0.3, 1.0, 1.7]) for _ in range(rows)])
    top_k = torch.tensor([draw.choice([0, 0, 1, 2, vocab // 2, vocab, vocab + 9]) for _ in range(rows)])
    top_p = torch.tensor([draw.choice([1.0, 1.0, 1e-6, draw.uniform(0.05, 0.999)]) for _ in range(rows)])
    min_p = torch.tensor([draw.choice([0.0, 0.0, draw.uniform(0.001, 0.9)]) for _ in range(rows)])
    uniform = ops.uniforms(torch.arange(rows) + seed, torch.arange(rows))
    params = temperature, top_k, top_p, min_p, uniform
    tokens, log_probs, drawn_with = ops.sample(logits, *params)

    inverse = ops.inverse_temperature(temperature)
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


def test_of_equal_tokens_a_cut_and_the_likeliest_take_the_lower_ones():
    logits = torch.tensor([1.0, 3.0, 0.0, 3.0, 2.0, -0.0, 3.0, 1.0, 0.0, -torch.inf] * 40).to(HALF)[None]
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


def test_the_likeliest_tokens_have_the_log_probabilities_that_a_draw_of_them_has():
    logits, temperature = (_randn(5, 6, 300) * 4).to(HALF), torch.full((6,), 0.85)
    tops = ops.top_log_probs(logits, temperature, [3, 0, 20, 300, 400, 1])
    assert [len(top) for top in tops] == [3, 0, 20, 300, 300, 1]
    for row, top in enumerate(tops):
        tokens = torch.tensor([token for token, _ in top], dtype=torch.int64)
        inverse = ops.inverse_temperature(temperature[:1]).repeat(len(top))
        scores = ops.logits_log_probs(logits[row].expand(len(top), -1), tokens, inverse)[0]
        assert [score for _, score in top] == scores.tolist() == sorted(scores.tolist(), reverse=True)


def test_a_uniform_number_of_zero_draws_no_token_that_was_cut():
    # A piece of the vocabulary whose weight is above 0, but below what a sum of weights counts in.
    logits = torch.full((1, 16), -60.0, dtype=HALF)
    logits[0, [3, 8, 15]] = torch.tensor([53.75, 12.1875, 97.5], dtype=HALF)
    one, none = torch.ones(1), torch.zeros(1)
    token, log_prob, cut = ops.sample(logits, one, torch.tensor([3]), one, none, none.double())
    assert token.item() in (3, 8, 15) and log_prob.isfinite() and cut.isfinite()
