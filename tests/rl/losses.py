"""A run's packing, policy loss and forward passes, for tests that need no run."""

import torch

from lockstep.config import algorithm_of
from lockstep.rl.environments.protocol import Example
from lockstep.rl.rollouts.packing import packing_of, policy_batches
from lockstep.rl.rollouts.records import Rollout, Scores
from lockstep.rl.scoring.forward import ForwardPasses
from lockstep.rl.scoring.policy_loss import PolicyLoss
from lockstep.rl.scoring.reference import token_log_probs
from lockstep.rl.scoring.value_head import ValueScorer, make_value_head


def drawn_rollouts(model, longest):
    """Three groups of four completions with random tokens and rewards, without log-probabilities."""
    draw, made = torch.Generator().manual_seed(0), []
    for number in range(12):
        length = int(torch.randint(1, longest + 1, (), generator=draw))
        tokens = torch.randint(model.config.vocab_size, (length + 3,), generator=draw).tolist()
        scores = Scores(reward=float(torch.randint(3, (), generator=draw)))
        made.append(Rollout(Example("p"), number // 4, tokens[:3], tokens[3:], [], "stop", "", 0, scores=scores))
    return made


def drawn_value_head(config, model, seed=3):
    """With random weights; None for an algorithm without values."""
    value_head = make_value_head(config, model)
    if value_head:
        with torch.no_grad():
            value_head.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(seed))
    return value_head


def batches_of(rollouts, config, **others):
    return policy_batches(rollouts, packing_of(config), **others)


def loss_of(config, compare=False, value_head=None):
    masked, replayed = config.mask_truncated_completions, config.router_replay
    return PolicyLoss(algorithm_of(config), config.temperature, compare, masked, replayed, value_head)


def log_probs_of(model, rollouts, config):
    return token_log_probs(model, rollouts, config.temperature, _forward(config))


def assign_values(rollouts, model, value_head, config):
    ValueScorer(model, value_head, _forward(config)).score(rollouts)


def _forward(config):
    return ForwardPasses(config.train.tokens_per_microbatch)
