"""An environment that talks with the model, and the conversation as it sees it.

They exchange plain data: messages, texts and numbers. An environment does not see who samples the replies, or where.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.rl.conversations.without_reasoning import spoken
from lockstep.rl.environments.protocol import Environment, Example, Message
from lockstep.tool_call import ToolCall

Rewards = float | Mapping[str, float]
"""One number, or several by name."""


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
        from lockstep.rl.conversations.tools import answer_calls

        chat.add(example.prompt)
        reply = await chat.reply()
        while reply.tool_calls:
            await answer_calls(chat, reply, self.tools)
            reply = await chat.reply()
        return None

    async def grade(self, example: Example, episodes: Sequence[Episode]) -> Sequence[Rewards] | None:
        """Rewards of all conversations about one example, graded together; None: each is graded separately."""
        return None
