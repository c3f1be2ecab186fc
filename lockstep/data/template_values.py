"""Values for a chat template besides the messages, such as `{"enable_thinking": false}`: `chat_template_kwargs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lockstep.data.chat import ChatTemplate, ChatTemplateError
from lockstep.errors import UserError, closest

KEY, OPTION = "chat_template_kwargs", "--chat-template-kwargs"
ALWAYS_SET = frozenset(
    ("messages", "add_generation_prompt", "tools", "documents", "self", "generation_begins", "generation_ends")
)
"""Names that every rendering sets already."""


def template_values(raw: Any, template: ChatTemplate | None, named: str = f'"{KEY}"') -> dict[str, Any]:
    """A row's or command's values: an object, a string of its JSON, or None. Null values are dropped.

    Raises ChatTemplateError for anything else, and for a name that the template does not read.
    """
    if isinstance(raw, str):
        raw = from_json(named, raw)
    if raw is not None and not isinstance(raw, Mapping):
        raise ChatTemplateError(f"{named} is not an object")
    values = {name: value for name, value in (raw or {}).items() if value is not None}
    known = readable_values(template)
    if unread := next((name for name in values if name not in known), None):
        hint = closest(unread, known) or " Leave it out"
        raise ChatTemplateError(f"{named} has {unread!r:.60}, which the chat template does not read.{hint}")
    return values


def from_json(named: str, text: str) -> Any:
    """Decodes a value that is a string of JSON. Raises ChatTemplateError, naming it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{named} is not JSON ({error})") from error


def readable_values(template: ChatTemplate | None) -> set[str]:
    """Names that the template reads and nothing else sets."""
    names = template.variables if template else frozenset()
    names |= template.tool_use.variables if template and template.tool_use else frozenset()
    return {name for name in names - ALWAYS_SET if not name.endswith("_token")}


def command_values(raw: str | Mapping[str, Any], template: ChatTemplate | None) -> dict[str, Any]:
    """`template_values` of a command's `--chat-template-kwargs`, which may be empty. Raises UserError."""
    try:
        return template_values(raw or None, template, OPTION)
    except ChatTemplateError as error:
        raise UserError(f"{error}; give an object, such as '{{\"enable_thinking\": false}}'") from error
