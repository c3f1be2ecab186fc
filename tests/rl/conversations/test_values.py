"""The value function over conversations: what belongs to the model's own tokens, and to which of them."""

import math
from dataclasses import replace

import pytest
import torch

import lockstep.rl as rl
from lockstep import build_model, ops
from lockstep.config import RLConfig, TrainConfig, algorithm_of
from lockstep.model import ModelConfig
from lockstep.rl.rollouts.advantages import assign_advantages
from lockstep.rl.rollouts.records import Conversation, Scores
from lockstep.rl.scoring.value_head import make_value_head
from tests.rl.losses import assign_values, batches_of, log_probs_of, loss_of

SHAPE = ModelConfig(
    family="qwen3", vocab_size=40, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    intermediate_size=48, qk_norm=True, max_positions=64,
)  # fmt: skip
MASK = [True, False, False, True, True, False, True]


def _row(group=0, episode=0, start=4, tokens=MASK, **changes):
    """A row of a conversation, of which the environment says some tokens between the model's."""
    ids = [(3 * start + 7 * n) % 40 for n in range(len(tokens))]
    given = dict(conversation=Conversation([], turns=2), sampled=list(tokens), episode=episode) | changes
    return rl.Rollout(rl.Example("p"), group, [1, start], ids, [-0.5] * sum(tokens), "stop", "", 0, **given)


def _step():
    """Two conversations of two rows, of other lengths, and other masks."""
    return [
        _row(0, 0, 4, scores=Scores(reward=1.0)),
        _row(0, 0, 9, [*MASK[::-1], True, False, True], scores=Scores(reward=1.0)),
        _row(0, 1, 6, MASK[:4]), _row(0, 1, 8),
    ]  # fmt: skip


def _alone(rollout, found):
    """What `found` has at the positions before the sampled tokens: each row by itself, without packing."""
    tokens = torch.tensor(rollout.prompt_ids + rollout.token_ids)
    before = [len(rollout.prompt_ids) + place - 1 for place, own in enumerate(rollout.sampled) if own]
    return found(tokens)[before].tolist()


@pytest.mark.parametrize("tokens", [1, 30, 10**6])
def test_values_scores_and_entropies_are_those_of_the_models_own_tokens(tokens):
    config = RLConfig(model="m", algorithm="ppo", temperature=0.7, train=TrainConfig(tokens_per_microbatch=tokens))
    model, rollouts = build_model(SHAPE, dtype="float32", seed=0), _step()
    value_head = make_value_head(config, model)
    with torch.no_grad():
        value_head.weight.copy_(torch.randn(value_head.weight.shape, generator=torch.Generator().manual_seed(3)))

    @torch.no_grad()
    def states(ids):
        return model(ids, torch.arange(len(ids)), ops.PackedAttention([len(ids)], ids.device))

    def scores(ids, which):
        return ops.token_log_probs(states(ids)[:-1], model.head_weight, ids[1:], config.temperature)[which].detach()

    for index, (rollout, own) in enumerate(zip(rollouts, log_probs_of(model, rollouts, config))):
        assert own == _alone(rollout, lambda ids: scores(ids, 0))
        rollouts[index] = replace(rollout, logprobs=own)
        rollout.scores.reference_logprobs = own
    assign_values(rollouts, model, value_head, config)
    assign_advantages(rollouts, algorithm_of(config))
    loss = loss_of(config, compare=True, value_head=value_head)
    for batch in batches_of(rollouts, config):
        loss(model, batch)
    assert loss.parity.tokens_different == 0 < loss.parity.tokens_checked
    for rollout in rollouts:
        assert rollout.scores.values == _alone(rollout, lambda ids: value_head(states(ids)).detach())
        assert rollout.scores.entropies == _alone(rollout, lambda ids: scores(ids, 1))
        assert not rollout.scores.trainer_logprobs


def test_a_conversations_reward_is_earned_with_the_last_token_of_its_last_row():
    """With λ = 0 an advantage is r + V' − V of its own token, and so tells where the reward and the rows' ends are."""
    config = RLConfig(model="m", algorithm="ppo", gae_lambda=0.0, normalize_advantages=False, kl_coefficient=0.0)
    rollouts = _step()
    for number, rollout in enumerate(rollouts):
        rollout.scores.values = [float(10 * number + place * place) for place in range(rollout.num_sampled)]
    assign_advantages(rollouts, algorithm_of(config))
    for first, second in (rollouts[:2], rollouts[2:]):
        values = first.scores.values + second.scores.values
        expected = [after - v for v, after in zip(values, [*values[1:], 0.0 + first.scores.reward])]
        assert first.scores.token_advantages + second.scores.token_advantages == expected
        assert first.scores.returns + second.scores.returns == [a + v for a, v in zip(expected, values)]
        assert len(first.scores.returns) == len(first.scores.values)
        assert first.scores.advantage == second.scores.advantage == math.fsum(expected) / len(expected)
