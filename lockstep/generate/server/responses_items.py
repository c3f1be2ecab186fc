"""The items of a conversation in the form of `/v1/responses`, and the messages that they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.protocol import Message, Strictly, TextOr, refuse_unknown_in
from lockstep.generate.server.tool_bodies import CallBody, CalledFunction, Part


class Item(Part):
    """Any item. Its id and its status do not affect the response."""

    id: str | None = None
    status: str | None = None

    def check(self, where: str) -> None:
        """Raises ApiError for an unknown field."""
        refuse_unknown_in(self, where)
        for name in type(self).model_fields:
            parts = getattr(self, name)
            for number, part in enumerate(parts if isinstance(parts, list) else ()):
                refuse_unknown_in(part, f"{where}.{name}.{number}")


class TextPart(Part):
    """A part of a message. Annotations and log-probabilities are those of an earlier response."""

    type: Literal["input_text", "output_text"] = Field(
        description="input_text or output_text: other parts are not supported here"
    )
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Content = TextOr[TextPart]


class MessageItem(Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None


class ReasoningPart(Part):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(Item):
    """Reasoning of an earlier response. Its encrypted content cannot be read here, and is ignored."""

    type: Literal["reasoning"]
    summary: Strictly[ReasoningPart] | None = None
    content: Strictly[ReasoningPart] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class OtherItem(Item):
    """An item, or a tool, of a type that is not supported."""

    type: str

    def check(self, where: str) -> None:
        message = f"{where} is of the type {self.type[:64]!r}, which is not supported here; remove it"
        raise ApiError(400, message, where.partition(".")[0], "unsupported_parameter")


KINDS = ("message", "reasoning", "function_call", "function_call_output")


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    return "(message)" if kind is None else f"({kind})" if kind in KINDS else "(other)"


InputItem = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")]
    | Annotated[CallItem, Tag("(function_call)")]
    | Annotated[ResultItem, Tag("(function_call_output)")]
    | Annotated[OtherItem, Tag("(other)")],
    Discriminator(_kind),
]


def messages_of(items: str | Sequence[Item], between: str) -> list[Message]:
    """The messages of a conversation; reasoning, text and calls that follow each other are one of the assistant's.

    between: the separator of a content's parts.
    """
    if isinstance(items, str):
        return [Message(role="user", content=items)]
    messages: list[Message] = []
    for item in items:
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        match item:
            case MessageItem(role="assistant"):
                if last is None or last.content is not None or last.tool_calls:
                    messages.append(last := Message(role="assistant"))
                last.content = _text(item.content, between)
            case MessageItem():
                messages.append(Message(role=item.role, content=_text(item.content, between)))
            case ReasoningItem():
                if last is None or last.content is not None or last.tool_calls:
                    messages.append(last := Message(role="assistant"))
                last.reasoning_content = "\n".join(filter(None, (last.reasoning_content, item.text))) or None
            case CallItem():
                if last is None:
                    messages.append(last := Message(role="assistant"))
                function = CalledFunction(name=item.name, arguments=item.arguments)
                last.tool_calls = [*(last.tool_calls or ()), CallBody(id=item.call_id, function=function)]
            case ResultItem():
                text = _text(item.output, between)
                messages.append(Message(role="tool", tool_call_id=item.call_id, content=text))
    return messages


def _text(content: str | Iterable[TextPart], between: str) -> str:
    return content if isinstance(content, str) else between.join(part.text for part in content)
