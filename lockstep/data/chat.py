"""Chat messages to text, by the template in the model's folder, and which of it the assistant says."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lockstep.data.tokenizer import CHAT_TEMPLATE_FILE
from lockstep.errors import UserError

SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")


# Around what `{% generation %}` holds; no conversation contains them.
BEGINS, ENDS = "\0<assistant\0", "\0assistant>\0"


class ChatTemplateError(ValueError):
    """These messages do not fit the template."""


class ChatTemplate:
    """Renders as transformers' `apply_chat_template` does: the same environment, functions and special tokens.

    Raises jinja2.TemplateError for a source that is no template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]):
        self.source = source
        self.special_tokens = special_tokens
        self._template = _environment().from_string(source)
        self._marks = re.search(r"\{%[-+]?\s*generation\b", source) is not None
        self.variables = meta.find_undeclared_variables(self._template.environment.parse(source))

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, dict[str, str]]]:
        return ChatTemplate, (self.source, self.special_tokens)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **values: Any) -> str:
        """The conversation's text, by default up to where the assistant begins to speak.

        Raises ChatTemplateError for messages that the template refuses.
        """
        # Templates ask whether `tools is none`, as transformers renders without them.
        names = {"tools": None, "documents": None, **self.special_tokens, **values}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
        except Exception as error:  # a template is a program: these messages can make it raise anything
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error

    def render_with_assistant(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """A whole conversation's text, and from which character to which the assistant speaks.

        That is what the template marks with `{% generation %}` or, where it marks nothing, what each message of the
        assistant adds to the prompt for it. Raises ChatTemplateError for messages that the template refuses, and where
        it renders the beginning of a conversation otherwise than alone.
        """
        text = self.render(messages, add_generation_prompt=False, tools=tools)
        spans = self._marked(text, messages, tools) if self._marks else self._added(text, messages, tools)
        return text, [(start, stop) for start, stop in spans if stop > start]

    def _marked(self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[tuple[int, int]]:
        marks = {"generation_begins": BEGINS, "generation_ends": ENDS}
        marked = self.render(messages, add_generation_prompt=False, tools=tools, **marks)
        before, *said = marked.split(BEGINS)
        plain, spans = before, []
        for part in said:
            inside, _, after = part.partition(ENDS)
            spans.append((len(plain), len(plain) + len(inside)))
            plain += inside + after
        if plain != text:
            raise ChatTemplateError(
                "the chat template changes what stands in {% generation %} afterwards; let it only write it"
            )
        return spans

    def _added(self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[tuple[int, int]]:
        spans = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self.render(messages[:index], add_generation_prompt=True, tools=tools)
            through = self.render(messages[: index + 1], add_generation_prompt=False, tools=tools)
            if not through.startswith(prompt) or not text.startswith(through):
                raise ChatTemplateError(
                    f"the chat template renders the conversation up to message {index + 1} otherwise than as the "
                    "beginning of the whole, so what the assistant says there cannot be told; mark it with "
                    "{% generation %} in the template, or end each conversation with its only answer"
                )
            spans.append((len(prompt), len(through)))
        return spans


def load_chat_template(folder: Path, file: str = "") -> ChatTemplate | None:
    """The folder's `chat_template.jinja`, or what `tokenizer_config.json` holds; None where neither has one.

    A `file` that is given takes their place. Raises UserError for a template that cannot be read.
    """
    settings: dict[str, Any] = {}
    for name in SETTINGS_FILES:
        if (folder / name).is_file():
            try:
                # A token that is null is one that this file does not say.
                settings |= {k: v for k, v in json.loads((folder / name).read_text()).items() if v is not None}
            except (ValueError, AttributeError) as error:
                raise UserError(f"{folder / name}: not a JSON object ({error}); mend it or take it away") from error
    path = Path(file) if file else folder / CHAT_TEMPLATE_FILE
    if file and not path.is_file():
        raise UserError(f"{path}: no such file; give a chat template with --template FILE, or leave it out")
    source = path.read_text() if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = next((t["template"] for t in source if t["name"] == "default"), None)
    if source is None:
        return None
    special = {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
    return make_chat_template(source, {k: v for k, v in special.items() if isinstance(v, str)}, file or str(folder))


def make_chat_template(source: str, special_tokens: dict[str, str], where: str) -> ChatTemplate:
    """Raises UserError, naming `where`, for a source that is no template."""
    try:
        return ChatTemplate(source, special_tokens)
    except jinja2.TemplateError as error:
        raise UserError(f"{where}: the chat template cannot be read ({error}); mend it or take it away") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class GenerationBlock(Extension):
    """`{% generation %}`, with which templates mark what the assistant says; it changes no text by itself."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [_write("generation_begins", line), *body, _write("generation_ends", line)]


def _write(name: str, line: int) -> nodes.Node:
    """Writes a variable's value; nothing where it is not given."""
    return nodes.Output([nodes.Name(name, "load", lineno=line)], lineno=line)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
