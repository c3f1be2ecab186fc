"""An environment that talks with the model, and the conversation as it sees it.

What passes between them is plain data: messages, texts and numbers. Who samples the replies, and where, an environment
does not see.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.rl.environment import Environment, Example

Message = dict[str, Any]
"""What chat templates take: `role` (system, user, assistant, tool), `content`, and whatever else a template shows."""
Rewards = float | Mapping[str, float]
"""One number, or several by name."""


class ConversationOver(Exception):
    """No reply is to be had: the conversation is at its limit of turns or of tokens. Let it pass, or end by it."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote in a reply."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot be read, for the model; empty: it can."""


@dataclass(frozen=True)
class Reply:
    """What the model said in one turn."""

    text: str
    finish_reason: str = "stop"
    """`stop`, or `length` where it was cut at max_new_tokens."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Episode:
    """A conversation that has ended."""

    messages: Sequence[Message]
    rewards: Rewards | None = None
    """What `converse` returned."""
    over: bool = False
    """Whether it ended at its limit of turns or of tokens."""

    @property
    def answer(self) -> str:
        """The text of the last reply; empty where there is none."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "assistant"), "")


Ask = Callable[[Sequence[Message]], Awaitable[Reply]]
"""The model's reply to a conversation, whose earlier replies were its own. Raises ConversationOver."""


class Chat:
    """A conversation with the model, from the environment's side."""

    def __init__(self, ask: Ask) -> None:
        self.messages: list[Message] = []
        """All of it so far. Add to its end; what stands there already the model has seen."""
        self.seconds: dict[str, float] = {}
        """What each tool took, by its name."""
        self._ask = ask

    def add(self, content: str, role: str = "user", **values: Any) -> None:
        """Says something to the model, which sees it with the next reply."""
        self.messages.append({"role": role, "content": content, **values})

    async def reply(self) -> Reply:
        """What the model says now. Raises ConversationOver at the limit of turns or of tokens."""
        reply = await self._ask(self.messages)
        # As it was written, calls included: a template that shows it shows what the model wrote.
        self.messages.append({"role": "assistant", "content": reply.text})
        return reply


class ConversationEnvironment(Environment):
    """Examples and conversations about them. Write `examples`, and `converse`, `grade` or `reward`.

    A conversation's rewards are what `converse` returns; where that is None, what `grade` returns for the group; where
    that is None too, what `reward` or `rewards` say of the last reply, as for any other environment.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions, plain or coroutines, that the model may call: their names, docstrings and types are shown to it."""
    turns: ClassVar[int] = 8
    """Replies in a conversation, at most."""
    unfinished: ClassVar[Rewards] = 0.0
    """The rewards of a conversation that ConversationOver ended, where `converse` did not catch it. One number stands
    for every name that the others' rewards have."""

    async def converse(self, example: Example, chat: Chat) -> Rewards | None:
        """Talks about one example: by default its prompt and, as long as the model calls tools, their results."""
        from lockstep.rl.conversations.tools import answer_calls

        chat.add(example.prompt)
        reply = await chat.reply()
        while reply.tool_calls:
            await answer_calls(chat, reply, self.tools)
            reply = await chat.reply()
        return None

    async def grade(self, example: Example, episodes: Sequence[Episode]) -> Sequence[Rewards] | None:
        """Rewards of all conversations about one example, graded together; None: each by itself."""
        return None
