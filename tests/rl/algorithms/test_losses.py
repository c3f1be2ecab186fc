"""The policy loss as a sum: over micro-batches, at its bounds, and of the KL divergence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.rl import PolicyLossInputs, policy_loss, token_weights
from lockstep.rl.algorithms.losses import clip, clip_sequence


def _inputs(lengths, average, seed=0):
    draw = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    old = -torch.rand(count, generator=draw)
    return PolicyLossInputs(
        log_probs=(old + torch.randn(count, generator=draw) * 0.3).requires_grad_(),
        old_log_probs=old,
        advantages=torch.randn(count, generator=draw),
        weights=torch.cat(token_weights(lengths, average)),
        reference_log_probs=old + torch.randn(count, generator=draw) * 0.2,
    )


def _part(inputs, begin, end):
    parts = {n: v.detach()[begin:end].clone() for n, v in vars(inputs).items() if v is not None}
    parts["log_probs"].requires_grad_()
    return PolicyLossInputs(**parts)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sampled_from(["token", "sequence"]), st.data(),
    st.integers(0, 1000),
)  # fmt: skip
def test_micro_batches_add_up_to_the_step(lengths, average, data, seed):
    inputs = _inputs(lengths, average, seed)
    cut = data.draw(st.integers(0, sum(lengths)))
    whole, whole_metrics = policy_loss(inputs, 0.2, 0.28, kl_coefficient=0.1)
    whole.backward()
    parts = [_part(inputs, 0, cut), _part(inputs, cut, sum(lengths))]
    results = [policy_loss(part, 0.2, 0.28, kl_coefficient=0.1) for part in parts]
    for loss, _ in results:
        loss.backward()
    # A token's gradient is its own, so it has the same bits; sums of 30 float32 terms of order 0.1 differ in rounding
    # (3e-8 measured).
    assert torch.equal(torch.cat([part.log_probs.grad for part in parts]), inputs.log_probs.grad)
    torch.testing.assert_close(sum(loss for loss, _ in results), whole, rtol=0, atol=1e-6)
    for name in ("policy/clip_fraction", "policy/kl"):
        torch.testing.assert_close(sum(m[name] for _, m in results), whole_metrics[name], rtol=0, atol=1e-6)
    ratios = [m["policy/ratio_max"] for part, (_, m) in zip(parts, results) if part.log_probs.numel()]
    assert max(ratios) == whole_metrics["policy/ratio_max"]


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
