"""A conversation with the model, from the environment's side: messages and replies, as plain data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.rl.conversations.reasoning import answer_text
from lockstep.rl.environments.protocol import Message
from lockstep.tool_call import ToolCall


class ConversationOver(Exception):
    """The conversation is at its limit of turns or tokens: there are no more replies. Let it propagate, or return."""


@dataclass(frozen=True)
class Reply:
    """The model's reply in one turn."""

    text: str
    finish_reason: str = "stop"
    """`stop`, or `length` if it was truncated at max_new_tokens."""
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_tokens: int | None = None
    """Number of tokens of the conversation before it; None if the reply was written by hand, not sampled."""
    completion_tokens: int | None = None
    """Number of sampled tokens, including the end token; None as for `prompt_tokens`."""
    reasoning: str = ""
    """The reasoning before the answer; also in `text`, between `<think>` and `</think>`, if the family writes it so."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its message besides role and content: reasoning and calls, for families with channels."""
    content: str | None = None
    """The answer without reasoning and calls; None if the reply was written by hand, not sampled."""

    @property
    def spoken(self) -> str:
        """The answer without reasoning; of a reply written by hand, including its calls."""
        return answer_text(self.text) if self.content is None else self.content


Ask = Callable[[Sequence[Message]], Awaitable[Reply]]
"""Returns the model's reply to a conversation. Raises ConversationOver."""


class Chat:
    """A conversation with the model, from the environment's side."""

    def __init__(self, ask: Ask) -> None:
        self.messages: list[Message] = []
        """All messages so far. Only append: the model has already seen the earlier ones."""
        self.seconds: dict[str, float] = {}
        """Seconds per tool, by name."""
        self._ask = ask

    def add(self, content: str | Sequence[Message], role: str = "user", **values: Any) -> None:
        """Adds a message, or all messages of an example's prompt; the model sees them when it writes the next reply."""
        if isinstance(content, str):
            self.messages.append({"role": role, "content": content, **values})
        else:
            self.messages += [dict(message) for message in content]

    async def reply(self) -> Reply:
        """The model's next reply. Raises ConversationOver at the limit of turns or tokens."""
        reply = await self._ask(self.messages)
        # Verbatim, including calls: the template then shows what the model wrote. Only channels are separate fields.
        self.messages.append({"role": "assistant", "content": reply.text, **reply.message})
        return reply
