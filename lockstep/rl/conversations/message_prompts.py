"""Prompts that are lists of messages, such as `[system, user]`: validation and instructions."""

from __future__ import annotations

import json
from typing import Any

from lockstep.rl.environments.protocol import Message


def prompt_messages(prompt: Any) -> list[Message]:
    """The messages of a prompt as chat templates expect them: contents as text, arguments of tool calls as objects.

    Raises ValueError with what is wrong, as a phrase whose subject is the prompt.
    """
    from lockstep.data.chat import ChatTemplateError  # a reward worker does not need numpy
    from lockstep.data.messages import are_messages, plain

    if not prompt or not are_messages(prompt):
        raise ValueError("is a list, but not of messages: objects with `role` and `content`")
    try:
        messages: list[Message] = [plain(message) for message in prompt]
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
    """The messages with `instruction` appended to the last user message."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    instructed = {**messages[last], "content": f"{messages[last].get('content') or ''}{instruction}"}
    return [*messages[:last], instructed, *messages[last + 1 :]]
