"""Chat messages to a prompt, by the template in the model's folder."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lockstep.data.tokenizer import CHAT_TEMPLATE_FILE
from lockstep.errors import UserError
from lockstep.generate.server.api_error import ApiError

SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")


class ChatTemplate:
    """Renders as transformers' `apply_chat_template` does: the same environment, functions and special tokens."""

    def __init__(self, template: jinja2.Template, special_tokens: dict[str, str]):
        self._template = template
        self._special_tokens = special_tokens

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt, up to where the assistant begins to speak. Raises ApiError for messages that it refuses."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except Exception as error:  # a template is a program: these messages can make it raise anything
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", "messages", "chat_template"
            ) from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The folder's `chat_template.jinja`, or what `tokenizer_config.json` holds; None where neither has one."""
    settings: dict[str, Any] = {}
    for name in SETTINGS_FILES:
        if (folder / name).is_file():
            try:
                # A token that is null is one that this file does not say.
                settings |= {k: v for k, v in json.loads((folder / name).read_text()).items() if v is not None}
            except (ValueError, AttributeError) as error:
                raise UserError(f"{folder / name}: not a JSON object ({error}); mend it or take it away") from error
    path = folder / CHAT_TEMPLATE_FILE
    source = path.read_text() if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = next((t["template"] for t in source if t["name"] == "default"), None)
    if source is None:
        return None
    special = {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"{folder}: the chat template cannot be read ({error}); mend it or take it away") from error
    return ChatTemplate(template, {k: v for k, v in special.items() if isinstance(v, str)})


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class GenerationBlock(Extension):
    """`{% generation %}`, with which templates mark what the assistant said; it changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
