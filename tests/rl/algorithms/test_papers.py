"""Each algorithm, from rewards to the gradient, against a slow float64 transcription of its paper's equations."""

import math

import pytest
import torch

from tests.rl.algorithms.steps import LIMIT, drawn_step, inputs_of, loss_and_gradient, named

# Advantages and weights are kept in float32: 6e-8 of each, 1e-7 together, measured (a loss near 0, as a share: 6e-7).
TOLERANCE = 1e-6


def _agree(step, algorithm, transcribed):
    """`transcribed(step)` is the objective that the paper maximises, as a function of `step.new`."""
    ours, gradient, _ = loss_and_gradient(inputs_of(step, algorithm), algorithm)
    step.new = [x.clone().requires_grad_() for x in step.new]
    value = transcribed(step)
    value.backward()
    theirs = torch.cat([x.grad for x in step.new if x.grad is not None])
    assert abs(ours + value.detach()) < TOLERANCE
    assert (gradient + theirs).abs().max() < TOLERANCE * theirs.abs().max() and theirs.any()


def _groups(step):
    """(index of the completion, its group's rewards, its place there)"""
    samples = len(step.groups[0])
    return [(index, step.groups[index // samples], index % samples) for index in range(len(step.lengths))]


def _mean(values):
    return sum(values) / len(values)


def _std(values):
    return math.sqrt(sum((v - _mean(values)) ** 2 for v in values) / len(values))


def _min_clip(ratio, advantage, low, high):
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def _ratio(step, i, t):
    return torch.exp(step.new[i][t] - step.old[i][t])


def _normalized(rewards, place):
    return (rewards[place] - _mean(rewards)) / (_std(rewards) + 1e-4)


def _sum(step, term):
    """Of `term(completion, token, its group's rewards, its place there)` over the step's tokens."""
    return sum(term(i, t, rewards, place) for i, rewards, place in _groups(step) for t in range(step.lengths[i]))


@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_has_the_gradient_of_its_paper(seed):
    """arXiv 2402.03300, equations 3 and 4; advantages of section 4.1.2."""

    def objective(step):
        def term(i, t, rewards, place):
            d = step.reference[i][t] - step.new[i][t]
            clipped = _min_clip(_ratio(step, i, t), _normalized(rewards, place), 0.2, 0.2)
            return (clipped - 0.04 * (torch.exp(d) - d - 1)) / step.lengths[i] / len(step.lengths)

        return _sum(step, term)

    _agree(drawn_step(seed), named("grpo", loss_average="sequence", kl_coefficient=0.04), objective)


def test_dr_grpo_has_the_gradient_of_its_paper():
    """arXiv 2503.20783, section 3.2: no division by the deviation, nor by the completion's length."""

    def objective(step):
        def term(i, t, rewards, place):
            return _min_clip(_ratio(step, i, t), rewards[place] - _mean(rewards), 0.2, 0.2)

        return _sum(step, term) / len(step.lengths) / LIMIT

    _agree(drawn_step(), named("dr_grpo"), objective)


def test_dapo_has_the_gradient_of_its_paper():
    """arXiv 2503.14476, equation 8: separate bounds, every token of the step with the same weight."""

    def objective(step):
        def term(i, t, rewards, place):
            return _min_clip(_ratio(step, i, t), _normalized(rewards, place), 0.2, 0.28)

        return _sum(step, term) / sum(step.lengths)

    _agree(drawn_step(), named("dapo"), objective)


@pytest.mark.parametrize("bounds", [(3e-4, 4e-4), (0.1, 0.15)])
def test_gspo_has_the_gradient_of_its_paper(bounds):
    """arXiv 2507.18071, equations 5 to 7."""

    def objective(step):
        total = 0.0
        for i, rewards, place in _groups(step):
            s = torch.exp(sum(step.new[i][t] - step.old[i][t] for t in range(step.lengths[i])) / step.lengths[i])
            total = total + _min_clip(s, _normalized(rewards, place), *bounds)
        return total / len(step.lengths)

    _agree(drawn_step(spread=0.2), named("gspo", clip_low=bounds[0], clip_high=bounds[1]), objective)


@pytest.mark.parametrize("bounds", [(1.0, 4.0), (0.2, 0.3)])
def test_cispo_has_the_gradient_of_its_paper(bounds):
    """arXiv 2506.13585, equations 4 and 5."""

    def objective(step):
        def term(i, t, rewards, place):
            weight = torch.clamp(_ratio(step, i, t).detach(), 1 - bounds[0], 1 + bounds[1])
            return weight * _normalized(rewards, place) * step.new[i][t]

        return _sum(step, term) / sum(step.lengths)

    _agree(drawn_step(spread=0.5), named("cispo", clip_low=bounds[0], clip_high=bounds[1]), objective)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rloo_has_the_gradient_of_its_paper(beta):
    """arXiv 2402.14740, section 2.2: the estimator's baseline is the mean of the others, the KL is in the reward.

    In units of the limit of tokens, which is a constant.
    """

    def objective(step):
        total, samples = 0.0, len(step.groups[0])
        shaped = [
            rewards[place] - beta * float((step.old[i] - step.reference[i]).sum())
            for i, rewards, place in _groups(step)
        ]
        for i, _, place in _groups(step):
            others = [shaped[i - place + j] for j in range(samples) if j != place]
            total = total + (shaped[i] - _mean(others)) * sum(step.new[i])
        return total / len(step.lengths) / LIMIT

    _agree(drawn_step(), named("rloo", kl_coefficient=beta), objective)


def _in_ppos_loss(step, advantages):
    """PPO's clipped loss with advantages by completion and token, normalized over the batch's tokens."""
    mean, std = _mean(advantages.values()), _std(advantages.values())
    terms = (_min_clip(_ratio(step, *token), (a - mean) / std, 0.2, 0.2) for token, a in advantages.items())
    return sum(terms) / sum(step.lengths)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_reinforce_plus_plus_has_the_gradient_of_its_paper(beta):
    """arXiv 2501.03262: A_t = r − β Σ KL(i) for i ≥ t, normalised over the batch's tokens, in PPO's clipped loss."""

    def objective(step):
        advantages = {}
        for i, rewards, place in _groups(step):
            for t in range(step.lengths[i]):
                advantages[i, t] = rewards[place] - beta * float((step.old[i] - step.reference[i])[t:].sum())
        return _in_ppos_loss(step, advantages)

    _agree(drawn_step(), named("reinforce++", kl_coefficient=beta), objective)


def test_reinforce_plus_plus_with_baseline_has_the_gradient_of_its_paper():
    """arXiv 2501.03262: the group's mean as baseline, normalised over the batch's tokens; k2 in the loss."""

    def objective(step):
        tokens = [(i, t, r[place] - _mean(r)) for i, r, place in _groups(step) for t in range(step.lengths[i])]
        k2 = _sum(step, lambda i, t, *_: (step.new[i][t] - step.reference[i][t]) ** 2 / 2)
        return _in_ppos_loss(step, {(i, t): a for i, t, a in tokens}) - 0.01 * k2 / sum(step.lengths)

    _agree(drawn_step(), named("reinforce++-baseline", kl_coefficient=0.01), objective)


@pytest.mark.parametrize(("gamma", "lambda_", "beta"), [(1.0, 0.95, 0.0), (0.9, 0.8, 0.1), (1.0, 1.0, 0.1)])
@pytest.mark.parametrize("clip", [0.2, 0.0])
def test_ppo_has_the_gradient_of_its_paper(gamma, lambda_, beta, clip):
    """arXiv 1707.06347, equations 7 and 9, with the advantages of arXiv 1506.02438, equation 16."""
    estimates = {}

    def objective(step):
        for i, n in enumerate(step.lengths):
            # The reward is earned with the last token; the KL divergence is charged at each.
            rewards = [-beta * float(step.old[i][t] - step.reference[i][t]) for t in range(n)]
            rewards[-1] += step.rewards[i]
            values = [*step.values[i].tolist(), 0.0]
            deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
            for t in range(n):
                estimates[i, t] = sum((gamma * lambda_) ** k * deltas[t + k] for k in range(n - t))
        return _in_ppos_loss(step, estimates) - 0.3 * _value_loss(step, estimates, clip)

    # `_agree` compares the gradients of the log-probabilities; those of the values are compared below.
    algorithm = named(
        "ppo", gae_gamma=gamma, gae_lambda=lambda_, kl_coefficient=beta, value_coefficient=0.3, value_clip=clip
    )
    _agree(drawn_step(), algorithm, objective)
    step = drawn_step()
    inputs = inputs_of(step, algorithm)
    _, _, metrics = loss_and_gradient(inputs, algorithm)
    step.new_values = [x.clone().requires_grad_() for x in step.new_values]
    loss = _value_loss(step, estimates, clip)
    loss.backward()
    expected = 0.3 * torch.cat([x.grad for x in step.new_values])
    assert (inputs.values.grad - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert float(metrics["value/loss"]) == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    assert (metrics["value/clip_fraction"] > 0) == (clip > 0)


def _value_loss(step, advantages, clip):
    total = 0.0
    for (i, t), advantage in advantages.items():
        old, new = step.values[i][t], step.new_values[i][t]
        target = advantage + float(old)
        error = (new - target) ** 2
        if clip:
            bounded = old + torch.clamp(new - old, -clip, clip)
            error = torch.maximum(error, (bounded - target) ** 2)
        total = total + error / 2
    return total / sum(step.lengths)


def test_rejection_sampling_fine_tuning_has_the_gradient_of_its_paper():
    """arXiv 2304.06767, algorithm 1: the likelihood of the best completions of each prompt."""
    kept = []

    def objective(step):
        for i, rewards, place in _groups(step):
            if rewards[place] == max(rewards) and min(rewards) < max(rewards):
                kept.append(i)
        return sum(sum(step.new[i]) for i in kept) / sum(step.lengths[i] for i in kept)

    step = drawn_step()
    _agree(step, named("rejection"), objective)
    assert 0 < len(kept) < len(step.lengths)


def test_on_policy_distillation_has_the_gradient_of_its_paper():
    """arXiv 2306.08543, section 2.2, the single-step part: each token's gradient, weighed by log p_teacher − log p."""

    def objective(step):
        advantage = [teacher - old for teacher, old in zip(step.teacher, step.old)]
        return _sum(step, lambda i, t, *_: advantage[i][t] * step.new[i][t]) / sum(step.lengths)

    _agree(drawn_step(), named("distillation"), objective)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", "rloo"])
def test_off_policy_corrections_multiply_each_token_by_its_factor(loss, how, level):
    """min(ρ, C) of arXiv 1802.01561, section 4.1, or ρ within the bounds, times each token's term."""
    algorithm = named(loss, off_policy=how, off_policy_level=level, off_policy_low=0.8, off_policy_high=1.3)
    step = drawn_step()
    _, gradient, metrics = loss_and_gradient(inputs_of(step, algorithm), algorithm)
    _, uncorrected, _ = loss_and_gradient(inputs_of(step, named(loss)), named(loss))
    expected, within, ratios = [], 0, []
    for i, n in enumerate(step.lengths):
        difference = step.old[i] - step.sampler[i]
        for t in range(n):
            ratio = math.exp(float(difference.sum() if level == "sequence" else difference[t]))
            ratios.append(ratio)
            within += 1 / 1.1 <= ratio <= 1.1
            expected.append(min(ratio, 1.3) if how == "truncate" else ratio * (0.8 <= ratio <= 1.3))
    # Two float64 products in another order: 4e-16 measured. Exponentials may differ in the last bit.
    torch.testing.assert_close(gradient, uncorrected * torch.tensor(expected, dtype=torch.float64), rtol=2e-15, atol=0)
    assert float(metrics["off_policy/ratio_max"]) == pytest.approx(max(ratios), rel=1e-15)
    assert float(metrics["off_policy/ratio_min"]) == pytest.approx(min(ratios), rel=1e-15)
    if named(loss).loss_average == "token":
        assert float(metrics["off_policy/ratio_mean"]) == pytest.approx(_mean(ratios), rel=TOLERANCE)
        assert float(metrics["off_policy/ratio_within_1.1"]) == pytest.approx(within / len(ratios), rel=TOLERANCE)
        changed = sum(e != r for e, r in zip(expected, ratios)) / len(ratios)
        assert float(metrics["off_policy/corrected"]) == pytest.approx(changed, rel=TOLERANCE) and 0 < changed < 1


def test_the_entropy_bonus_is_taken_off_the_loss():
    algorithm = named("grpo", entropy_coefficient=0.3)
    plain, bonus = inputs_of(drawn_step(), named("grpo")), inputs_of(drawn_step(), algorithm)
    without, _, _ = loss_and_gradient(plain, named("grpo"))
    loss, _, metrics = loss_and_gradient(bonus, algorithm)
    assert plain.entropies.grad is None and torch.equal(bonus.entropies.grad, -0.3 * bonus.weights)
    mean = sum(float(x) for each in drawn_step().entropies for x in each) / sum(drawn_step().lengths)
    assert float(metrics["policy/entropy"]) == pytest.approx(mean, rel=TOLERANCE)
    assert float(loss) == pytest.approx(float(without) - 0.3 * mean, rel=TOLERANCE)
