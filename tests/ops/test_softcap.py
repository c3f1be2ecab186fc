"""Capped logits: the formula's values, the same bits on every instruction set, and the gradients of float64."""

import hashlib
import random

import pytest
import torch

from lockstep import ops
from lockstep.ops import head_gradients
from lockstep.ops.softcap import softcap_gradient

DTYPES = [torch.float32, torch.bfloat16]
DIGEST = "e28ce119a8b9b9b1"
"""Of values and gradients, on every instruction set."""


def spread(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """From far below one to far beyond the cap. Exact arithmetic: the same numbers on every machine."""
    words = (torch.arange(seed * 100_000, seed * 100_000 + count) * 2654435761 + 12345) % 2**32
    powers = torch.tensor([2.0 ** (power - 23) for power in range(-16, 10)])
    return ((words % 2**24 - 2**23).float() * powers[(words >> 24) % len(powers)]).to(dtype)


@pytest.mark.parametrize("cap", [0.7, 15.0, 30.0])
def test_values_are_those_of_the_formula_rounded_once(cap):
    x = torch.cat([spread(0, 20_001, torch.float32), torch.linspace(-cap, cap, 5_001), torch.tensor([0.0, -0.0])])
    exact = cap * torch.tanh(x.double() / cap)
    out = ops.softcap(x, cap)
    # Of a quotient, an exponential, three operations after it, and the product.
    assert ((out.double() - exact).abs() <= 4 * 2.0**-24 * exact.abs()).all()
    assert (out.abs() <= torch.tensor(cap)).all() and torch.equal(out.sign(), x.sign())
    assert torch.equal(ops.softcap(x.bfloat16(), cap), ops.softcap(x.bfloat16().float(), cap).bfloat16())
    edge = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38])
    assert torch.equal(ops.softcap(edge, cap).nan_to_num(-9.0), torch.tensor([cap, -cap, -9.0, cap, -cap]))


def test_bits_are_the_same_on_every_instruction_set(form):
    if form == "pytorch":
        pytest.skip("the plain form has bits of its own")
    digest = hashlib.sha256()
    for dtype in DTYPES:
        for cap in (0.7, 15.0):
            logits, grad = spread(1, 50_003, dtype), spread(2, 50_003, dtype)
            out = ops.softcap(logits, cap)
            for each in (out, softcap_gradient(grad, out, cap)):
                digest.update(each.view(torch.int16).numpy().tobytes())
    assert digest.hexdigest()[:16] == DIGEST


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_has_the_same_bits_wherever_it_is_and_whatever_the_threads(threads, dtype):
    logits, grad, draw = spread(3, 40_000, dtype), spread(4, 40_000, dtype), random.Random(0)
    threads(1)
    whole = ops.softcap(logits, 15.0)
    of_whole = softcap_gradient(grad, whole, 15.0)
    for _ in range(60):
        threads(draw.choice([1, 3]))
        first = draw.randrange(39_999)
        part = slice(first, first + draw.choice([1, 7, 16, 33, 20_000]))
        assert torch.equal(ops.softcap(logits[part], 15.0), whole[part])
        assert torch.equal(softcap_gradient(grad[part], whole[part], 15.0), of_whole[part])
    turned = ops.softcap(logits.view(200, 200).T, 15.0)
    assert torch.equal(turned.T.reshape(-1), whole), "of logits that are not contiguous"


@pytest.mark.parametrize(
    ("dtype", "slice_bytes"), [(torch.float32, 1 << 27), (torch.float32, 4096), (torch.bfloat16, 4096)]
)
def test_log_probabilities_of_capped_logits_and_their_gradients_are_those_of_float64(dtype, slice_bytes, monkeypatch):
    monkeypatch.setattr(head_gradients, "SLICE_BYTES", slice_bytes)
    draw, cap, vocab = torch.Generator().manual_seed(0), 3.0, 258
    factors = [torch.randn(count, 64, generator=draw).to(dtype) / (4 if count == vocab else 1) for count in (50, vocab)]
    targets, terms = torch.randint(vocab, (50,), generator=draw), ops.HeadTerms(softcap=cap)
    weights = torch.randn(2, 50, generator=draw)

    leaves = [x.clone().requires_grad_() for x in factors]
    exact = [x.double().requires_grad_() for x in factors]
    table = torch.log_softmax(cap * torch.tanh(exact[0] @ exact[1].T / cap) / 0.8, -1)
    expected = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    found = ops.token_log_probs(*leaves, targets, 0.8, terms)
    at_one = torch.log_softmax(cap * torch.tanh(exact[0] @ exact[1].T / cap), -1).gather(1, targets[:, None]).sum() / 50
    sums = [
        (sum((x * w).sum() for x, w in zip(each, weights)), leaf) for each, leaf in ((found, leaves), (expected, exact))
    ]
    sums += [(ops.log_prob_sum(*leaves, targets, 1 / 50, terms), leaves), (at_one, exact)]
    results = [[total.detach(), *torch.autograd.grad(total, leaf, retain_graph=True)] for total, leaf in sums]
    # In bfloat16, a capped logit is rounded to 1/128 at 3, where the slope is what is left of one.
    tolerance = 5e-5 if dtype == torch.float32 else 4e-2
    for ours, theirs in (results[:2], results[2:]):
        for mine, reference in zip(ours, theirs):
            assert (mine.double() - reference).abs().max() < tolerance * reference.abs().max().clamp(min=1e-3)
    again = torch.autograd.grad(sums[0][0], leaves)
    assert all(map(torch.equal, again, results[0][1:])), "the second backward pass recomputes the logits"


def test_the_operators_own_gradient_is_that_of_its_formula():
    x = spread(3, 1000, torch.float32).requires_grad_()
    (gradient,) = torch.autograd.grad(ops.softcap(x, 15.0).sum(), x)
    expected = 1 - torch.tanh(x.detach().double() / 15).square()
    # Of a slope up to 1, computed in float32 from the capped logit, which is rounded too.
    torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=3e-7)
