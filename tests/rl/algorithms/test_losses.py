"""The policy loss as a sum: over micro-batches, at its bounds, and of the KL divergence."""

import pytest
import torch

from lockstep import ops
from lockstep.rl import PolicyLossInputs, policy_loss, token_weights
from lockstep.rl.algorithms.losses import clip, clip_sequence


def _inputs(lengths, average, seed=0, reference=True):
    draw = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    old = -torch.rand(count, generator=draw)
    return PolicyLossInputs(
        log_probs=(old + torch.randn(count, generator=draw) * 0.3).requires_grad_(),
        old_log_probs=old,
        advantages=torch.randn(count, generator=draw),
        weights=torch.cat(token_weights(lengths, average)),
        reference_log_probs=old + torch.randn(count, generator=draw) * 0.2 if reference else None,
    )


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


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_no_metric_carries_a_gradient(average):
    _, metrics = policy_loss(_inputs([3, 4], average), 0.2, 0.2, kl_coefficient=0.1)
    assert not any(value.requires_grad for value in metrics.values()) and all(m.ndim == 0 for m in metrics.values())


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_empty_completions_weigh_nothing(average):
    weights = token_weights([0, 2, 0, 3], average)
    assert [len(w) for w in weights] == [0, 2, 0, 3]
    for with_empty, without in zip((weights[1], weights[3]), token_weights([2, 3], average)):
        assert torch.equal(with_empty, without)
    assert [len(w) for w in token_weights([0], average)] == [0]


@pytest.mark.parametrize("reference", [False, True])
def test_the_loss_is_the_clipped_objective(reference):
    inputs = _inputs([5, 7], "token", reference=reference)
    loss, metrics = policy_loss(inputs, 0.2, 0.28, kl_coefficient=0.1)
    total, clipped = 0.0, 0.0
    new, old, advantages = (x.detach().double() for x in (inputs.log_probs, inputs.old_log_probs, inputs.advantages))
    for i in range(12):
        ratio = torch.exp(new[i] - old[i])
        bounded = ratio.clamp(0.8, 1.28)
        total += -torch.minimum(advantages[i] * ratio, advantages[i] * bounded) / 12
        clipped += float(advantages[i] * bounded < advantages[i] * ratio) / 12
        if reference:
            distance = inputs.reference_log_probs[i].double() - new[i]
            total += 0.1 * (torch.exp(distance) - distance - 1) / 12
    # Twelve terms of order 0.1, summed in float32: 5e-9 measured.
    assert abs(float(loss.detach()) - float(total)) < 1e-7
    assert abs(float(metrics["policy/clip_fraction"]) - clipped) < 1e-7 and clipped > 0
    assert ("policy/kl" in metrics) == reference


def test_on_policy_the_ratio_is_1_and_the_gradient_is_the_policy_gradient():
    inputs = _inputs([5, 7], "token")
    inputs.log_probs = inputs.old_log_probs.clone().requires_grad_()
    loss, metrics = policy_loss(inputs, 0.2, 0.2)
    loss.backward()
    assert float(metrics["policy/ratio_max"]) == 1.0 and float(metrics["policy/clip_fraction"]) == 0.0
    assert torch.equal(inputs.log_probs.grad, -inputs.advantages * inputs.weights)


def test_weights_average_over_tokens_or_over_sequences():
    tokens, sequences = token_weights([1, 3], "token"), token_weights([1, 3], "sequence")
    assert [w.tolist() for w in tokens] == [[0.25], [0.25] * 3]
    assert sequences[0].tolist() == [0.5] and sequences[1].tolist() == torch.full((3,), 1 / 6).tolist()
