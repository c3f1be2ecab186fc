"""Reinforcement learning: environments, rewards, advantages, the policy loss and the loop."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.rl.algorithms import PolicyLossInputs, group_advantages, token_weights
    from lockstep.rl.algorithms.objective import objective, policy_loss
    from lockstep.rl.conversations import (
        Chat,
        ConversationEnvironment,
        ConversationOver,
        Episode,
        Reply,
        ToolCall,
    )
    from lockstep.rl.environments.loading import load_environment
    from lockstep.rl.environments.protocol import Environment, Example
    from lockstep.rl.grading import Grade, grade
    from lockstep.rl.rollouts.records import Rollout, Scores, write_rollouts

# Imported at first use: a file with an environment imports this package in every reward worker, which needs no torch.
_NAMES = {
    "lockstep.rl.algorithms": "PolicyLossInputs group_advantages objective policy_loss token_weights",
    "lockstep.rl.conversations": "Chat ConversationEnvironment ConversationOver Episode Reply ToolCall",
    "lockstep.rl.environments.loading": "load_environment",
    "lockstep.rl.environments.protocol": "Environment Example",
    "lockstep.rl.grading": "Grade grade",
    "lockstep.rl.rollouts.records": "Rollout Scores write_rollouts",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Chat",
    "ConversationEnvironment",
    "ConversationOver",
    "Environment",
    "Episode",
    "Example",
    "Grade",
    "PolicyLossInputs",
    "Reply",
    "Rollout",
    "Scores",
    "ToolCall",
    "grade",
    "group_advantages",
    "load_environment",
    "objective",
    "policy_loss",
    "token_weights",
    "write_rollouts",
]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep.rl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
