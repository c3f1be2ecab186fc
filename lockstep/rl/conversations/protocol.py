"""An environment that talks with the model, and its finished conversations.

It exchanges plain data with the model, and does not know which engine samples the replies, or where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.rl.conversations.chat import Chat
from lockstep.rl.conversations.tools import answer_calls
from lockstep.rl.environments.protocol import Environment, Example, Message

Rewards = float | Mapping[str, float]
"""One number, or several by name."""


@dataclass(frozen=True)
class Episode:
    """A finished conversation."""

    messages: Sequence[Message]
    rewards: Rewards | None = None
    """The result of `converse`."""
    over: bool = False
    """Whether it ended at its limit of turns or tokens."""

    @property
    def answer(self) -> str:
        """The text of the last reply; empty if there is none."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "assistant"), "")


class ConversationEnvironment(Environment):
    """Examples and conversations about them. Write `examples`, and `converse`, `grade` or `reward`.

    A conversation's rewards are the result of `converse`; if that is None, the result of `grade` for the group; if that
    is None too, the result of `reward` or `rewards` for the last reply, as in any other environment.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions or coroutines that the model can call: it sees their names, docstrings and types."""
    turns: ClassVar[int] = 8
    """Maximum number of replies in a conversation."""
    unfinished: ClassVar[Rewards] = 0.0
    """Rewards of a conversation ended by ConversationOver, if `converse` did not catch it. A single number is used for
    every name in the others' rewards."""

    async def converse(self, example: Example, chat: Chat) -> Rewards | None:
        """Converses about one example. Default: sends its prompt, then tool results until the model calls no tool."""
        chat.add(example.prompt)
        reply = await chat.reply()
        while reply.tool_calls:
            await answer_calls(chat, reply, self.tools)
            reply = await chat.reply()
        return None

    async def grade(self, example: Example, episodes: Sequence[Episode]) -> Sequence[Rewards] | None:
        """Rewards of all conversations about one example, graded together; None: each is graded separately."""
        return None
