"""Reinforcement learning: environments, rewards, advantages, the policy loss and the loop."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.rl.algorithms import AdvantageInputs as AdvantageInputs
    from lockstep.rl.algorithms import PolicyLossInputs as PolicyLossInputs
    from lockstep.rl.algorithms import group_advantages as group_advantages
    from lockstep.rl.algorithms import token_weights as token_weights
    from lockstep.rl.algorithms.objective import objective as objective
    from lockstep.rl.algorithms.objective import policy_loss as policy_loss
    from lockstep.rl.conversations import Chat as Chat
    from lockstep.rl.conversations import ConversationEnvironment as ConversationEnvironment
    from lockstep.rl.conversations import ConversationOver as ConversationOver
    from lockstep.rl.conversations import Episode as Episode
    from lockstep.rl.conversations import Reply as Reply
    from lockstep.rl.conversations import ToolCall as ToolCall
    from lockstep.rl.environments.loading import load_environment as load_environment
    from lockstep.rl.environments.protocol import Environment as Environment
    from lockstep.rl.environments.protocol import Example as Example
    from lockstep.rl.grading import Grade as Grade
    from lockstep.rl.grading import grade as grade
    from lockstep.rl.rollouts.records import Rollout as Rollout
    from lockstep.rl.rollouts.records import Scores as Scores
    from lockstep.rl.rollouts.records import write_rollouts as write_rollouts
    from lockstep.rl.session import Session as Session

# Imported at first use: a file with an environment imports this package in every reward worker, which needs no torch.
_HOMES = {
    name: f"lockstep.rl.{module}"
    for module, names in {
        "algorithms": "AdvantageInputs PolicyLossInputs group_advantages objective policy_loss token_weights",
        "conversations": "Chat ConversationEnvironment ConversationOver Episode Reply ToolCall",
        "environments.loading": "load_environment",
        "environments.protocol": "Environment Example",
        "grading": "Grade grade",
        "rollouts.records": "Rollout Scores write_rollouts",
        "session": "Session",
    }.items()
    for name in names.split()
}

__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep.rl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
