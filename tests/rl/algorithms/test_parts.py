"""KL estimators, distillation and the overlong penalty by what they are for, with every token enumerated."""

import pytest
import torch

from lockstep.rl.algorithms import distillation_advantages, divergences, overlong_penalty, rewards_to_go, whitened

# float64 sums over a vocabulary of seven, of terms below 1, in two orders: 6e-17 measured, and 1e-15 of the value.
FLOAT64 = dict(rtol=1e-14, atol=1e-15)


def _policy_and_reference(seed=0, vocab=7):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, dtype=torch.float64, generator=draw).requires_grad_()
    return logits, torch.log_softmax(torch.randn(vocab, dtype=torch.float64, generator=draw), 0)


def _divergence(logits, reference):
    log_probs = torch.log_softmax(logits, 0)
    return (log_probs.exp() * (log_probs - reference)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_an_estimate_over_the_policy_is_the_divergence(estimator):
    logits, reference = _policy_and_reference()
    log_probs = torch.log_softmax(logits.detach(), 0)
    mean = (log_probs.exp() * divergences(log_probs, reference, estimator)).sum()
    torch.testing.assert_close(mean, _divergence(logits.detach(), reference), **FLOAT64)


def _mean_gradient(logits, of_token):
    """Of a loss at each token, over the policy's own draws, which have no gradient."""
    log_probs = torch.log_softmax(logits, 0)
    (gradient,) = torch.autograd.grad((log_probs.detach().exp() * of_token(log_probs)).sum(), logits)
    return gradient


def test_what_the_gradient_of_each_estimate_is_on_average():
    logits, reference = _policy_and_reference()
    (exact,) = torch.autograd.grad(_divergence(logits, reference), logits)
    gradients = {k: _mean_gradient(logits, lambda p, k=k: divergences(p, reference, k)) for k in ("k1", "k2", "k3")}
    assert gradients["k1"].abs().max() < FLOAT64["atol"], "as a loss, k1 holds nothing back"
    torch.testing.assert_close(gradients["k2"], exact, **FLOAT64)
    forward = (reference.exp() * (reference - torch.log_softmax(logits, 0))).sum()
    torch.testing.assert_close(gradients["k3"], torch.autograd.grad(forward, logits)[0], **FLOAT64)


def test_distillation_follows_the_gradient_of_the_reverse_divergence():
    """arXiv 2306.13649, equation 3, with KL(policy ‖ teacher) of one next-token distribution."""
    logits, teacher = _policy_and_reference(3)
    (exact,) = torch.autograd.grad(_divergence(logits, teacher), logits)
    own = torch.log_softmax(logits.detach(), 0)
    advantages = torch.tensor(distillation_advantages(own.tolist(), teacher.tolist()), dtype=torch.float64)
    torch.testing.assert_close(_mean_gradient(logits, lambda p: -advantages * p), exact, **FLOAT64)


def test_the_overlong_penalty_is_that_of_dapo():
    """arXiv 2503.14476, equation 13, with L_max 20 and L_cache 4."""
    for length in range(1, 31):
        expected = 0.0 if length <= 16 else (16 - length) / 4 if length <= 20 else -1.0
        assert overlong_penalty(length, 20, 0.2) == expected, length
    assert overlong_penalty(20, 20, 0.0) == 0.0, "a share of 0 charges nothing"


def test_a_token_pays_for_itself_and_those_after_it():
    assert rewards_to_go(1.0, [0.5, 0.25, 0.125]) == [0.125, 0.625, 0.875]


def test_what_is_whitened_has_mean_0_and_deviation_1_over_the_tokens_of_the_step():
    out = [a for part in whitened([[1.0, 1.0, 1.0], [0.0], [3.0, -2.0]]) for a in part]
    # Six float64 terms below 2, and a mean and a deviation that are rounded: 4e-16 measured.
    assert sum(out) == pytest.approx(0, abs=2e-15) and sum(a * a for a in out) / 6 == pytest.approx(1, abs=2e-15)
    assert whitened([[0.1, 0.1], [0.1], []]) == [[0.0, 0.0], [0.0], []]
    # Rounding is no reason, and what is too small to be squared none to divide by 0.
    for close in ([0.1 + 0.2, 0.3, 0.3], [1e-200, 2e-200]):
        assert all(abs(a) < 1e-11 for a in whitened([close])[0])
