"""A conversation with the model, as the environment sees it: messages and replies, as plain data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.rl.conversations.without_reasoning import spoken
from lockstep.rl.environments.protocol import Message
from lockstep.tool_call import ToolCall


class ConversationOver(Exception):
    """There are no more replies: the conversation is at its limit of turns or tokens. Let it propagate, or return."""


@dataclass(frozen=True)
class Reply:
    """What the model said in one turn."""

    text: str
    finish_reason: str = "stop"
    """`stop`, or `length` if it was cut off at max_new_tokens."""
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_tokens: int | None = None
    """Tokens of the conversation that it replies to; None if it was not sampled, but written by hand."""
    completion_tokens: int | None = None
    """Tokens that were sampled, with the one that ended it; None as for `prompt_tokens`."""
    reasoning: str = ""
    """What it thought before. It is in `text` too, between `<think>` and `</think>`, where the family writes it so."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """What its message has besides role and content: reasoning and calls, where the family has channels for them."""
    content: str | None = None
    """What it said apart from reasoning and calls; None if it was not sampled, but written by hand."""

    @property
    def spoken(self) -> str:
        """What it said apart from reasoning; of a reply written by hand, also its calls."""
        return spoken(self.text) if self.content is None else self.content


Ask = Callable[[Sequence[Message]], Awaitable[Reply]]
"""Returns the model's reply to a conversation. Raises ConversationOver."""


class Chat:
    """A conversation with the model, from the environment's side."""

    def __init__(self, ask: Ask) -> None:
        self.messages: list[Message] = []
        """All messages so far. Only append: the model has already seen the others."""
        self.seconds: dict[str, float] = {}
        """Seconds that each tool took, by name."""
        self._ask = ask

    def add(self, content: str | Sequence[Message], role: str = "user", **values: Any) -> None:
        """Adds a message, which the model sees when it writes the next reply, or all those of an example's prompt."""
        if isinstance(content, str):
            self.messages.append({"role": role, "content": content, **values})
        else:
            self.messages += [dict(message) for message in content]

    async def reply(self) -> Reply:
        """The model's next reply. Raises ConversationOver at the limit of turns or tokens."""
        reply = await self._ask(self.messages)
        # Verbatim, including calls: a template that shows it shows what the model wrote. Only channels are apart.
        self.messages.append({"role": "assistant", "content": reply.text, **reply.message})
        return reply
