"""Log-probabilities under a head with low-rank updates: the bits of its operators in any company, and the gradients of
a plain transcription in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops import head_gradients
from tests.ops.test_linear import DTYPES, cancelling

VOCAB, DIM, COUNT = 130, 32, 50


def _factors(dtype):
    """Hidden states, a head, and A and B of two updates."""
    draw = torch.Generator().manual_seed(0)
    shapes = (COUNT, DIM), (VOCAB, DIM), (4, DIM), (VOCAB, 4), (3, DIM), (VOCAB, 3)
    scales = 1, 0.25, 0.25, 0.25, 0.25, 0.25
    return [(torch.randn(*shape, generator=draw) * scale).to(dtype) for shape, scale in zip(shapes, scales)]


def _terms(matrices, rows, cap):
    pairs = zip(matrices[::2], matrices[1::2], (2.0, 8 / 3), rows)
    return ops.HeadTerms(softcap=cap, updates=tuple(ops.LowRank(*pair) for pair in pairs))


SOME = torch.tensor([3, 49, 0, 17, 18]), torch.tensor([48, 1, 2])
"""Rows of each update; the other rows have none."""


@pytest.mark.parametrize("cap", [0.0, 3.0], ids=["plain", "capped"])
@pytest.mark.parametrize(
    ("dtype", "slice_bytes"), [(torch.float32, 1 << 27), (torch.float32, 4096), (torch.bfloat16, 4096)]
)
@pytest.mark.parametrize("rows", [(None,), SOME], ids=["all rows", "some rows"])
def test_values_and_gradients_are_those_of_float64(dtype, slice_bytes, rows, cap, monkeypatch):
    monkeypatch.setattr(head_gradients, "SLICE_BYTES", slice_bytes)
    factors = _factors(dtype)[: 2 + 2 * len(rows)]
    targets = torch.randint(VOCAB, (COUNT,), generator=torch.Generator().manual_seed(1))
    grads = torch.randn(2, COUNT, generator=torch.Generator().manual_seed(2))
    leaves = [x.clone().requires_grad_() for x in factors]
    hidden, head, *matrices = leaves
    found = ops.token_log_probs(hidden, head, targets, 0.8, _terms(matrices, rows, cap))

    exact = [x.double().requires_grad_() for x in factors]
    logits = exact[0] @ exact[1].T
    for a, b, scaling, some in zip(exact[2::2], exact[3::2], (2.0, 8 / 3), rows):
        chosen = torch.zeros(COUNT, 1, dtype=torch.float64)
        chosen[slice(None) if some is None else some] = scaling
        logits = logits + chosen * (exact[0] @ a.T @ b.T)
    table = torch.log_softmax((cap * torch.tanh(logits / cap) if cap else logits) / 0.8, -1)
    expected = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    results = []
    for values, tensors in ((found, leaves), (expected, exact)):
        total = sum((value * grad).sum() for value, grad in zip(values, grads))
        results.append([*values, *torch.autograd.grad(total, tensors, retain_graph=True)])
    # bfloat16 rounds logits, their gradients and the inner products of an update.
    tolerance = 5e-5 if dtype == torch.float32 else 4e-2
    for mine, reference in zip(*results):
        assert (mine.double() - reference).abs().max() < tolerance * reference.abs().max()
    total = sum((value * grad).sum() for value, grad in zip(found, grads))
    again = torch.autograd.grad(total, leaves)
    assert all(map(torch.equal, again, results[0][2:])), "the second backward pass recomputes the logits"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frozen_head_has_no_gradient_and_the_sum_is_that_of_the_log_probabilities(dtype, monkeypatch):
    monkeypatch.setattr(head_gradients, "SLICE_BYTES", 4096)
    factors = _factors(dtype)
    targets = torch.arange(COUNT) * 2
    results = []
    for summed in (True, False):
        hidden, head, *matrices = (x.clone().requires_grad_(place != 1) for place, x in enumerate(factors))
        terms = _terms(matrices, SOME, 3.0)
        if summed:
            total = ops.log_prob_sum(hidden, head, targets, -0.37, terms)
        else:
            total = ops.total(ops.token_log_probs(hidden, head, targets, 1.0, terms)[0]) * -0.37
        total.backward()
        assert head.grad is None
        results.append([total.detach(), hidden.grad, *(matrix.grad for matrix in matrices)])
    assert all(map(torch.equal, *results))


def test_the_matrices_alone_can_be_trained():
    hidden, head, *matrices = _factors(torch.float32)
    for matrix in matrices:
        matrix.requires_grad_()
    ops.log_prob_sum(hidden, head, torch.arange(COUNT), 1.0, _terms(matrices, SOME, 0.0)).backward()
    assert all(matrix.grad.any() for matrix in matrices)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_matter(threads, dtype):
    hidden, head, *matrices = _factors(dtype)
    found = []
    for count in (1, 3):
        threads(count)
        found.append(ops.token_log_probs(hidden, head, torch.arange(COUNT), 0.7, _terms(matrices, SOME, 3.0)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), cap=st.sampled_from([0.0, 2.0]), data=st.data())
def test_a_row_has_the_bits_of_its_operators_in_any_company(form, dtype, seed, cap, data):
    rows = data.draw(st.integers(1, 12))
    having = data.draw(st.lists(st.integers(-1, 1), min_size=rows, max_size=rows))
    x, weights = cancelling(seed, rows, DIM, VOCAB + 5, dtype)
    head, *inner = weights.split([VOCAB, 3, 2])
    draw = torch.Generator().manual_seed(seed)
    matrices = [m for a in inner for m in (a, torch.randn(VOCAB, len(a), generator=draw).to(dtype))]
    owned = [torch.tensor([row for row, each in enumerate(having) if each == number]) for number in (0, 1)]
    terms = _terms(matrices, [each.long() for each in owned], cap)
    targets = torch.arange(rows)
    whole = ops.token_log_probs(x, head, targets, 0.7, terms)
    trained = x.clone().requires_grad_()
    assert all(map(torch.equal, whole, ops.token_log_probs(trained, head, targets, 0.7, terms)))
    factor = ops.inverse_temperature(torch.tensor([0.7]))
    for row, each in enumerate(having):
        logits = ops.linear(x[row][None], head)
        if each >= 0:
            a, b = matrices[2 * each : 2 * each + 2]
            logits = logits + ops.linear(ops.linear(x[row][None], a), b) * (2.0, 8 / 3)[each]
        logits = ops.softcap(logits, cap) if cap else logits
        alone = ops.logits_log_probs(logits, targets[row][None], factor)
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, whole))
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1)))
    part = ops.token_log_probs(x[chosen], head, targets[chosen], 0.7, terms.of(chosen))
    assert all(torch.equal(some, every[chosen]) for some, every in zip(part, whole)), "of rows that repeat"
