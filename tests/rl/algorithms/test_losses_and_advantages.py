"""Advantages and the policy loss against their formulas."""

import pytest
import torch

from lockstep.rl import PolicyLossInputs, group_advantages, policy_loss, token_weights


def test_advantages_are_relative_to_the_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [3.0, 1.0, 1.0, 1.0]])
    plain = group_advantages(rewards, normalize=False)
    assert plain.tolist() == [[0.5, -0.5, -0.5, 0.5], [0.0] * 4, [1.5, -0.5, -0.5, -0.5]]
    scaled = group_advantages(rewards, normalize=True)
    # Divided by the standard deviation 0.5 and √0.75, each with 1e-4 added; the quotients are rounded to float32.
    half, root = 0.5 + 1e-4, 0.75**0.5 + 1e-4
    expected = torch.tensor(
        [[0.5 / half, -0.5 / half, -0.5 / half, 0.5 / half], [0.0] * 4, [1.5 / root, *[-0.5 / root] * 3]]
    )
    torch.testing.assert_close(scaled, expected, rtol=1.2e-7, atol=0)
    assert scaled[1].tolist() == [0.0] * 4


def _inputs(seed: int = 0, reference: bool = False) -> PolicyLossInputs:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(12, generator=generator)
    new = (old + torch.randn(12, generator=generator) * 0.3).requires_grad_()
    advantages = torch.randn(12, generator=generator)
    kl = old + torch.randn(12, generator=generator) * 0.2 if reference else None
    return PolicyLossInputs(new, old, advantages, torch.cat(token_weights([5, 7], "token")), kl)


@pytest.mark.parametrize("reference", [False, True])
def test_the_loss_is_the_clipped_objective(reference):
    inputs = _inputs(reference=reference)
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
    inputs = _inputs()
    inputs.log_probs = inputs.old_log_probs.clone().requires_grad_()
    loss, metrics = policy_loss(inputs, 0.2, 0.2)
    loss.backward()
    assert float(metrics["policy/ratio_max"]) == 1.0 and float(metrics["policy/clip_fraction"]) == 0.0
    assert torch.equal(inputs.log_probs.grad, -inputs.advantages * inputs.weights)


def test_weights_average_over_tokens_or_over_sequences():
    tokens, sequences = token_weights([1, 3], "token"), token_weights([1, 3], "sequence")
    assert [w.tolist() for w in tokens] == [[0.25], [0.25] * 3]
    assert sequences[0].tolist() == [0.5] and sequences[1].tolist() == torch.full((3,), 1 / 6).tolist()
