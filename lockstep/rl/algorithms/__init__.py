"""Advantages, losses, KL estimators and off-policy corrections: pure functions of plain data."""

from lockstep.rl.algorithms.advantages import (
    best_of_group,
    distillation_advantages,
    explained_variance,
    generalized_advantages,
    group_advantages,
    leave_one_out_advantages,
    overlong_penalty,
    rewards_to_go,
    value_returns,
    whitened,
)
from lockstep.rl.algorithms.losses import LossFunction, PolicyLossInputs, divergences, token_weights, value_losses
from lockstep.rl.algorithms.objective import objective, policy_loss
from lockstep.rl.algorithms.off_policy import correction, ratio_metrics, ratios
from lockstep.rl.algorithms.own import AdvantageFunction, AdvantageInputs

__all__ = [
    "AdvantageFunction",
    "AdvantageInputs",
    "LossFunction",
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
