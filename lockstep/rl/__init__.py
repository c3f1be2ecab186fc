"""Reinforcement learning: environments, rewards, advantages, the policy loss and the loop."""

from lockstep.rl.advantages import group_advantages
from lockstep.rl.environment import Environment, Example, load_environment
from lockstep.rl.losses import PolicyLossInputs, policy_loss, token_weights
from lockstep.rl.rollouts import Rollout

__all__ = [
    "Environment",
    "Example",
    "PolicyLossInputs",
    "Rollout",
    "group_advantages",
    "load_environment",
    "policy_loss",
    "token_weights",
]
