"""Advantages, losses, KL estimators and off-policy corrections: pure functions of plain data."""

from lockstep.rl.algorithms.advantages import (
    best_of_group,
    distillation_advantages,
    group_advantages,
    leave_one_out_advantages,
    rewards_to_go,
    whitened,
)
from lockstep.rl.algorithms.gae import (
    explained_variance,
    generalized_advantages,
    value_losses,
    value_returns,
)
from lockstep.rl.algorithms.inputs import PolicyLossInputs
from lockstep.rl.algorithms.kl import divergences
from lockstep.rl.algorithms.objective import objective, policy_loss
from lockstep.rl.algorithms.off_policy import correction, ratio_metrics, ratios
from lockstep.rl.algorithms.overlong import overlong_penalty
from lockstep.rl.algorithms.weights import token_weights

__all__ = [
    "PolicyLossInputs",
    "best_of_group",
    "correction",
    "distillation_advantages",
    "divergences",
    "explained_variance",
    "generalized_advantages",
    "group_advantages",
    "leave_one_out_advantages",
    "objective",
    "overlong_penalty",
    "policy_loss",
    "ratio_metrics",
    "ratios",
    "rewards_to_go",
    "token_weights",
    "value_losses",
    "value_returns",
    "whitened",
]
