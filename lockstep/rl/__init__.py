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
_HOMES = {
    "Chat": "lockstep.rl.conversations",
    "ConversationEnvironment": "lockstep.rl.conversations",
    "ConversationOver": "lockstep.rl.conversations",
    "Environment": "lockstep.rl.environments.protocol",
    "Episode": "lockstep.rl.conversations",
    "Example": "lockstep.rl.environments.protocol",
    "Grade": "lockstep.rl.grading",
    "PolicyLossInputs": "lockstep.rl.algorithms",
    "Reply": "lockstep.rl.conversations",
    "Rollout": "lockstep.rl.rollouts.records",
    "Scores": "lockstep.rl.rollouts.records",
    "ToolCall": "lockstep.rl.conversations",
    "grade": "lockstep.rl.grading",
    "group_advantages": "lockstep.rl.algorithms",
    "load_environment": "lockstep.rl.environments.loading",
    "objective": "lockstep.rl.algorithms",
    "policy_loss": "lockstep.rl.algorithms",
    "token_weights": "lockstep.rl.algorithms",
    "write_rollouts": "lockstep.rl.rollouts.records",
}

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
