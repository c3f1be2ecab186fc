"""A run's packing, policy loss and forward passes, for tests that need no run."""

from lockstep.config import algorithm_of
from lockstep.rl.rollouts.packing import packing_of, policy_batches
from lockstep.rl.scoring.forward import ForwardPasses
from lockstep.rl.scoring.policy_loss import PolicyLoss
from lockstep.rl.scoring.reference import token_log_probs
from lockstep.rl.scoring.value_head import ValueScorer


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
