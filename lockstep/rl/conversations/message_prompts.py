"""Prompts that are conversations, such as `[system, user]`: what their messages must be."""

from __future__ import annotations

import json
from typing import Any

from lockstep.rl.environments.protocol import Message


def prompt_messages(given: Any) -> list[Message]:
    """The messages of a prompt as chat templates expect them: contents as text, arguments of tool calls as objects.

    Raises ValueError that says what is wrong with them.
    """
    from lockstep.data.chat import ChatTemplateError  # a reward worker does not need numpy
    from lockstep.data.messages import are_messages, plain

    if not given or not are_messages(given):
        raise ValueError("is a list, but not of messages: objects with `role` and `content`")
    try:
        messages: list[Message] = [plain(message) for message in given]
    except ChatTemplateError as error:
        raise ValueError(f"cannot be rendered: {error}") from error
    if not all(isinstance(message["role"], str) for message in messages):
        raise ValueError("has a message whose role is not a string")
    if messages[-1]["role"] == "assistant":
        raise ValueError("ends with the assistant, whose turn is next; leave that message out")
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"has messages that are not JSON ({error})") from error
    return messages


def with_instruction(messages: list[Message], instruction: str) -> list[Message]:
    """With a text added to what the user says last."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    asked = {**messages[last], "content": f"{messages[last].get('content') or ''}{instruction}"}
    return [*messages[:last], asked, *messages[last + 1 :]]
