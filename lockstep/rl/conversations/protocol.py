"""An environment that talks with the model: what it defines, and its finished conversations.

It exchanges plain data with the model, and does not see which engine samples the replies, or where.
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
    """What `converse` returned."""
    over: bool = False
    """Whether it ended at its limit of turns or tokens."""

    @property
    def answer(self) -> str:
        """The text of the last reply; empty if there is none."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "assistant"), "")


class ConversationEnvironment(Environment):
    """Examples and conversations about them. Write `examples`, and `converse`, `grade` or `reward`.

    A conversation's rewards are what `converse` returns; if that is None, what `grade` returns for the group; if that
    is also None, what `reward` or `rewards` return for the last reply, as in any other environment.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions or coroutines that the model can call: it is shown their names, docstrings and types."""
    turns: ClassVar[int] = 8
    """Most replies in a conversation."""
    unfinished: ClassVar[Rewards] = 0.0
    """The rewards of a conversation ended by ConversationOver, if `converse` did not catch it. A single number is used
    for every name in the others' rewards."""

    async def converse(self, example: Example, chat: Chat) -> Rewards | None:
        """Talks about one example: by default its prompt and, while the model calls tools, their results."""
        chat.add(example.prompt)
        reply = await chat.reply()
        while reply.tool_calls:
            await answer_calls(chat, reply, self.tools)
            reply = await chat.reply()
        return None

    async def grade(self, example: Example, episodes: Sequence[Episode]) -> Sequence[Rewards] | None:
        """Rewards of all conversations about one example, graded together; None: each is graded separately."""
        return None
