"""The policy loss as a sum: over micro-batches, at its bounds, and of the KL divergence."""

import pytest
import torch

from lockstep import ops
from lockstep.rl import PolicyLossInputs, policy_loss, token_weights
from lockstep.rl.algorithms.losses import clip, clip_sequence


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.27, 1.0, False), (1.29, 1.0, True), (0.5, 1.0, False),
        (0.81, -1.0, False), (0.79, -1.0, True), (2.0, -1.0, False),
    ],
)  # fmt: skip
def test_each_bound_cuts_the_gradient_on_its_own_side_only(ratio, advantage, clipped):
    log_prob = torch.tensor([ratio]).log().requires_grad_()
    inputs = PolicyLossInputs(log_prob, torch.zeros(1), torch.tensor([advantage]), torch.ones(1))
    loss, metrics = policy_loss(inputs, clip_low=0.2, clip_high=0.28)
    loss.backward()
    assert (float(log_prob.grad) == 0.0) == clipped and float(metrics["policy/clip_fraction"]) == float(clipped)
    # exp(log(r)) in float32: within two units in the last place of r (3e-8 measured).
    assert float(metrics["policy/ratio_max"]) == pytest.approx(ratio, rel=3e-7)


@pytest.mark.parametrize("loss_of", [clip, clip_sequence])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("log_ratio", [0.25, -0.25])
def test_a_ratio_exactly_on_a_bound_keeps_its_whole_gradient(log_ratio, advantage, loss_of):
    log_prob = torch.tensor([log_ratio], requires_grad=True)
    inputs = PolicyLossInputs(log_prob, torch.zeros(1), torch.tensor([advantage]), torch.ones(1))
    ratio = ops.exp(log_prob.detach())
    bound = abs(float(ratio.double()) - 1)  # exact in float64, and so is 1 plus or minus it
    losses, clipped = loss_of(inputs, bound, bound)
    losses.sum().backward()
    assert torch.equal(losses.detach(), -advantage * ratio) and torch.equal(log_prob.grad, -advantage * ratio)
    assert not clipped.any()


def test_the_divergence_from_oneself_is_exactly_zero_and_has_no_gradient():
    log_probs = (-torch.rand(9, generator=torch.Generator().manual_seed(0))).requires_grad_()
    same = log_probs.detach().clone()
    loss, metrics = policy_loss(
        PolicyLossInputs(log_probs, same, torch.zeros(9), torch.full((9,), 1 / 9), same), 0.2, 0.2, kl_coefficient=1.0
    )
    loss.backward()
    assert float(loss.detach()) == 0.0 == float(metrics["policy/kl"]) and not log_probs.grad.any()


def test_no_metric_carries_a_gradient():
    old = -torch.rand(7, generator=torch.Generator().manual_seed(0))
    inputs = PolicyLossInputs((old - 0.1).requires_grad_(), old, torch.ones(7), torch.full((7,), 1 / 7), old - 0.2)
    _, metrics = policy_loss(inputs, 0.2, 0.2, kl_coefficient=0.1)
    assert not any(value.requires_grad for value in metrics.values()) and all(m.ndim == 0 for m in metrics.values())


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_empty_completions_weigh_nothing(average):
    weights = token_weights([0, 2, 0, 3], average)
    assert [len(w) for w in weights] == [0, 2, 0, 3]
    for with_empty, without in zip((weights[1], weights[3]), token_weights([2, 3], average)):
        assert torch.equal(with_empty, without)
    assert [len(w) for w in token_weights([0], average)] == [0]


def test_weights_average_over_tokens_or_over_sequences():
    tokens, sequences = token_weights([1, 3], "token"), token_weights([1, 3], "sequence")
    assert [w.tolist() for w in tokens] == [[0.25], [0.25] * 3]
    assert sequences[0].tolist() == [0.5] and sequences[1].tolist() == torch.full((3,), 1 / 6).tolist()
