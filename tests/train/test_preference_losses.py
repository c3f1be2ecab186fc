"""Losses of preferences have the same bits everywhere; test_preferences_against_trl.py has their equations."""

import hashlib

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

DIGEST = "0100c50b66945a6f5f2fb030b4b7079df6c6cc9bd3fd6553a90d45e2abd9f17e"


def test_losses_and_gradients_have_the_same_bits_on_every_processor():
    digest = hashlib.sha256()
    # Not random numbers of PyTorch's, whose bits are those of a processor too.
    own, others, reference, other = ((torch.arange(1000) * step % 1009 - 500) / 25 for step in (37, 101, 211, 401))
    lengths = torch.arange(1000) % 7 + 1
    own.requires_grad_()
    chosen, rejected = AnswerLogProbs(own, reference, lengths), AnswerLogProbs(others, other, lengths.flip(0))
    for loss in (
        dpo_loss(chosen, rejected, 0.3, 0.1),
        ipo_loss(chosen, rejected, 0.3),
        simpo_loss(chosen, rejected, 0.3, 0.4),
        kto_loss(chosen, lengths > 3, 0.2, 0.3),
        bradley_terry_loss(own, others),
    ):
        (gradient,) = torch.autograd.grad(loss, own, torch.ones(1000))
        digest.update(torch.stack((loss.detach(), gradient)).numpy().tobytes())
    assert digest.hexdigest() == DIGEST


def test_ktos_divergence_is_a_mean_that_is_never_negative():
    assert kto_divergence(6.0, 4) == 1.5 and kto_divergence(-6.0, 4) == 0.0
