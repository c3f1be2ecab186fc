"""Reinforcement learning: environments, rewards, advantages, the policy loss and the loop."""

from lockstep.rl.algorithms import PolicyLossInputs, group_advantages, objective, policy_loss, token_weights
from lockstep.rl.environment import Environment, Example
from lockstep.rl.load_environment import load_environment
from lockstep.rl.rewards import Grade, grade
from lockstep.rl.rollouts import Rollout, write_rollouts

__all__ = [
    "Environment",
    "Example",
    "Grade",
    "PolicyLossInputs",
    "Rollout",
    "grade",
    "group_advantages",
    "load_environment",
    "objective",
    "policy_loss",
    "token_weights",
    "write_rollouts",
]
