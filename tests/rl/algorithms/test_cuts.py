"""A step's loss and gradient do not depend on how it was cut into micro-batches, for every algorithm and average."""

from dataclasses import replace

import pytest
import torch

from lockstep import build_model
from lockstep.config import ALGORITHMS, RLConfig, TrainConfig, algorithm_of
from lockstep.model import ModelConfig
from lockstep.rl.rollouts.advantages import assign_advantages
from tests.rl.algorithms.steps import drawn_step, inputs_of, loss_and_gradient, named, sliced
from tests.rl.losses import assign_values, batches_of, drawn_rollouts, drawn_value_head, log_probs_of, loss_of

AVERAGES = ("token", "sequence", "budget")
CORRECTIONS = [{}, {"off_policy": "truncate", "off_policy_level": "sequence"}, {"off_policy": "mask"}]


PAIRS = [(name, AVERAGES[number % 3]) for number, name in enumerate(ALGORITHMS)]
OF_EACH_LOSS = [(name, average) for name, average in PAIRS if name in ("grpo", "gspo", "cispo", "rloo", "ppo")]


@pytest.mark.parametrize(
    ("name", "average", "correction"), [(*pair, CORRECTIONS[number // 2 % 3]) for number, pair in enumerate(PAIRS)]
)
def test_parts_of_whole_completions_add_up_to_the_step(name, average, correction):
    algorithm = named(name, loss_average=average, kl_coefficient=0.1, entropy_coefficient=0.01, **correction)
    whole = inputs_of(drawn_step(seed=5), algorithm)
    loss, gradient, metrics = loss_and_gradient(whole, algorithm)
    count = len(whole.lengths)
    for size in (1, 2, 5):
        parts = [sliced(whole, first, min(first + size, count)) for first in range(0, count, size)]
        found = [loss_and_gradient(part, algorithm) for part in parts]
        # A token's gradient is its own, and what spans a completion is taken over it alone: the same bits.
        assert torch.equal(torch.cat([g for _, g, _ in found]), gradient)
        # Sums of up to a hundred float64 terms below 100 in another order: 4e-15 measured.
        assert abs(sum(part for part, _, _ in found) - loss) < 1e-13
        for metric, value in metrics.items():
            values = [m[metric] for _, _, m in found]
            joined = max(values) if metric.endswith("_max") else min(values) if metric.endswith("_min") else sum(values)
            assert abs(joined - value) < 1e-13, metric


SHAPE = ModelConfig(
    family="qwen3", vocab_size=40, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    intermediate_size=48, qk_norm="head", max_positions=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def rollouts():
    """A step of a small model, sampled by one that differs a little."""
    policy, other = (build_model(SHAPE, dtype="float32", seed=seed) for seed in (0, 1))
    made, draw = drawn_rollouts(policy, longest=8), torch.Generator().manual_seed(1)
    config = RLConfig(model="m", algorithm="ppo")
    assign_values(made, policy, drawn_value_head(config, policy), config)
    scores = log_probs_of(policy, made, config), log_probs_of(other, made, config)
    sampled = []
    for rollout, own, others in zip(made, *scores):
        noise = 0.1 * torch.randn(len(own), generator=draw)
        sampled.append(replace(rollout, logprobs=(torch.tensor(own) + noise).tolist()))
        rollout.scores.reference_logprobs = rollout.scores.teacher_logprobs = others
    return sampled


def _gradients(rollouts, name, average, tokens):
    """Summed in float64 over micro-batches of so many tokens."""
    config = RLConfig(
        model="m", algorithm=name, loss_average=average, kl_coefficient=0.1, entropy_coefficient=0.01,
        off_policy="truncate", max_new_tokens=9, train=TrainConfig(tokens_per_microbatch=tokens),
    )  # fmt: skip
    assign_advantages(rollouts, algorithm_of(config))
    model = build_model(SHAPE, dtype="float32", seed=0)
    value_head = drawn_value_head(config, model)
    parameters = dict(model.named_parameters()) | (value_head.parameters_by_name() if value_head else {})
    sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}
    batches = batches_of(rollouts, config)
    step = loss_of(config, compare=False, value_head=value_head)
    for batch in batches:
        for parameter in parameters.values():
            parameter.grad = None
        step(model, batch).backward()
        for name_, parameter in parameters.items():
            sums[name_] += parameter.grad.double()
    return sums, len(batches)


@pytest.mark.parametrize(("name", "average"), OF_EACH_LOSS)
def test_a_models_gradient_is_that_of_one_completion_at_a_time(rollouts, name, average):
    alone, count = _gradients(rollouts, name, average, 1)
    assert count == len(rollouts)
    for tokens in (10**6, 40):
        together, count = _gradients(rollouts, name, average, tokens)
        assert (count == 1) == (tokens == 10**6)
        for parameter, gradient in alone.items():
            # float32 sums over up to 100 rows, 6e-8 each, against float64 ones over completions: 5e-7 measured.
            error = (together[parameter] - gradient).abs().max() / gradient.abs().max()
            assert error < 1e-6, (parameter, float(error))
