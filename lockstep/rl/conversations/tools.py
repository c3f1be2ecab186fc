"""Calls that the model writes: reading them, running them, and what is said where one is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.rl.conversations.protocol import Chat, Reply


async def answer_calls(chat: Chat, reply: Reply, tools: Sequence[Callable[..., Any]]) -> None:
    """Runs each call of `reply` and adds its result, or what was wrong with it, as a message of the role `tool`."""
    raise NotImplementedError
