"""Losses of preferences against float64 transcriptions of the papers' equations, and against TRL's own trainers."""

import hashlib
import math

import pytest
import torch

from lockstep.train.preference_losses import (
    AnswerLogProbs,
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_divergence,
    kto_loss,
    simpo_loss,
)

BETA, MARGIN, SMOOTHING = 0.3, 0.4, 0.1
CHOSEN, REJECTED = [-4.0, -30.5, -2.25, -11.0], [-6.0, -20.0, -2.5, -11.0]
REFERENCE = [-5.0, -28.0, -3.0, -9.0], [-5.5, -24.0, -1.5, -9.0]
LENGTHS = [3, 11, 2, 7], [4, 9, 2, 7]


def _answers(which, dtype=torch.float32):
    own = torch.tensor((CHOSEN, REJECTED)[which], dtype=dtype, requires_grad=True)
    return AnswerLogProbs(own, torch.tensor(REFERENCE[which], dtype=dtype), torch.tensor(LENGTHS[which]))


def _sigmoid(x):
    return 1 / (1 + math.exp(-x))


def _pairs():
    return zip(CHOSEN, REJECTED, *REFERENCE, *LENGTHS)


def _smoothed(x, smoothing):
    return -(1 - smoothing) * math.log(_sigmoid(x)) - smoothing * math.log(_sigmoid(-x))


@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])
def test_losses_of_pairs_are_the_papers_equations(smoothing):
    """DPO's equation 7, SimPO's equation 6, and IPO's equation 17 with means over tokens."""
    found = dpo_loss(_answers(0), _answers(1), BETA, smoothing)
    expected = [_smoothed(BETA * ((c - rc) - (r - rr)), smoothing) for c, r, rc, rr, _, _ in _pairs()]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)  # float32
    found = simpo_loss(_answers(0), _answers(1), BETA, MARGIN, smoothing)
    expected = [_smoothed(BETA * c / n - BETA * r / m - MARGIN, smoothing) for c, r, _, _, n, m in _pairs()]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    found = ipo_loss(_answers(0), _answers(1), BETA)
    expected = [((c - rc) / n - (r - rr) / m - 1 / (2 * BETA)) ** 2 for c, r, rc, rr, n, m in _pairs()]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_kto_is_equation_8_and_its_divergence_a_mean_that_is_never_negative():
    desirable = torch.tensor([True, False, False, True])
    for divergence in (0.0, 0.7):
        found = kto_loss(_answers(0), desirable, divergence, BETA, 1.5, 0.5)
        expected = []
        for good, c, reference in zip(desirable.tolist(), CHOSEN, REFERENCE[0]):
            reward = BETA * (c - reference - divergence)
            expected.append(1.5 * (1 - _sigmoid(reward)) if good else 0.5 * (1 - _sigmoid(-reward)))
        assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert kto_divergence(6.0, 4) == 1.5 and kto_divergence(-6.0, 4) == 0.0


def test_bradley_terry_is_the_log_odds_of_the_scores():
    found = bradley_terry_loss(torch.tensor([1.0, -2.0, 90.0]), torch.tensor([0.5, 3.0, -90.0]))
    assert found.tolist() == pytest.approx([-math.log(_sigmoid(0.5)), -math.log(_sigmoid(-5.0)), 0.0], rel=1e-6)


def test_losses_and_gradients_have_the_same_bits_on_every_processor():
    digest = hashlib.sha256()
    # Not random numbers of PyTorch's, whose bits are those of a processor too.
    own, others, reference, other = ((torch.arange(1000) * step % 1009 - 500) / 25 for step in (37, 101, 211, 401))
    lengths = torch.arange(1000) % 7 + 1
    own.requires_grad_()
    chosen, rejected = AnswerLogProbs(own, reference, lengths), AnswerLogProbs(others, other, lengths.flip(0))
    for loss in (
        dpo_loss(chosen, rejected, BETA, SMOOTHING),
        ipo_loss(chosen, rejected, BETA),
        simpo_loss(chosen, rejected, BETA, MARGIN),
        kto_loss(chosen, lengths > 3, 0.2, BETA),
        bradley_terry_loss(own, others),
    ):
        (gradient,) = torch.autograd.grad(loss, own, torch.ones(1000))
        digest.update(torch.stack((loss.detach(), gradient)).numpy().tobytes())
    assert digest.hexdigest() == DIGEST


DIGEST = "0100c50b66945a6f5f2fb030b4b7079df6c6cc9bd3fd6553a90d45e2abd9f17e"


def test_no_loss_has_a_gradient_through_the_reference_and_all_have_one_of_float64():
    for loss in (
        lambda c, r: dpo_loss(c, r, BETA, SMOOTHING),
        lambda c, r: ipo_loss(c, r, BETA),
        lambda c, r: simpo_loss(c, r, BETA, MARGIN),
        lambda c, r: kto_loss(c, torch.tensor([True, False, True, False]), 0.2, BETA) + 0 * r.log_probs,
    ):

        def of_log_probs(own, others, loss=loss):
            chosen, rejected = _answers(0, torch.float64), _answers(1, torch.float64)
            return loss(
                AnswerLogProbs(own, chosen.reference_log_probs, chosen.lengths),
                AnswerLogProbs(others, rejected.reference_log_probs, rejected.lengths),
            )

        inputs = _answers(0, torch.float64).log_probs, _answers(1, torch.float64).log_probs
        assert torch.autograd.gradcheck(of_log_probs, inputs)
