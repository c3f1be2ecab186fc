"""Chat templates: loaded from a model's folder, or ChatML; messages rendered as text; values besides the messages."""

from __future__ import annotations

import json
import pickle
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.data.tokenizer import (
    CHAT_TEMPLATE_FILE,
    MORE_TEMPLATES,
    HuggingFaceTokenizer,
    Tokenizer,
    read_text,
    tokenizer_folder,
)
from lockstep.errors import UserError, closest
from lockstep.workers import Worker, WorkerEnded, from_json
from lockstep.workers.templates import MEMORY_BYTES

CHATML = "chatml"
"""The value of the setting `template` that selects ChatML, for models without a chat template.

A turn is `<|im_start|>ROLE`, a line feed, its text and `<|im_end|>`, with which the model learns to end its answers."""
BEGIN, END = "<|im_start|>", "<|im_end|>"
CHATML_SOURCE = """\
{%- for message in messages %}
{%- if message.tool_calls or tools %}
{{- raise_exception('ChatML has no tools; train with a template that has: lockstep sft --template FILE') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def with_chatml(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """The tokenizer with ChatML's two special tokens, added if missing, and `<|im_end|>` as its end-of-text token."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tokenizer.save(place)
        backend = Backend.from_file(str(place / "tokenizer.json"))
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (BEGIN, END)])
        backend.save(str(place / "tokenizer.json"))
        file = place / "tokenizer_config.json"
        settings = json.loads(file.read_text()) if file.is_file() else {}
        return HuggingFaceTokenizer(
            place / "tokenizer.json", END, tokenizer.bos_id, settings | {"eos_token": END}, dict(tokenizer.carried)
        )


SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")
FIX = "fix it, remove it or put a chat_template.jinja next to it"

SECONDS = 5.0
"""Limit of processor time for compiling or for one rendering."""
MOST_INPUT_BYTES = 2**26


# Delimiters around the contents of `{% generation %}`; no conversation contains them.
BEGINS, ENDS = "\0<assistant\0", "\0assistant>\0"


class ChatTemplateError(ValueError):
    """These messages do not fit the template."""


class ChatTemplate:
    """Renders as transformers' `apply_chat_template` does: the same environment, functions and special tokens.

    The template is compiled and rendered in a worker process (`workers/templates.py`), which is started once, and again
    after a rendering exceeded its limits. Thread-safe: renderings run one at a time. `tool_use`: the template used
    instead for conversations with tools.

    Raises ChatTemplateError for a source that is not a template, or whose compilation exceeds the limits.
    """

    variables: frozenset[str]
    """Variables that the source reads without setting them."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_use: str | None = None):
        self.source = source
        self.special_tokens = special_tokens
        self.marks = re.search(r"\{%[-+]?\s*generation\b", source) is not None
        """Whether it marks the assistant's text with `{% generation %}`."""
        self.tool_use = None if tool_use is None else ChatTemplate(tool_use, special_tokens)
        compile_it = pickle.dumps(source)
        self._worker = Worker("lockstep.workers.templates:Renderer", compile_it, seconds=SECONDS, memory=MEMORY_BYTES)
        try:
            self.variables = frozenset(_result(self._worker.start()))
        except WorkerEnded as error:
            raise ChatTemplateError(str(error)) from error

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, dict[str, str], str | None]]:
        return ChatTemplate, (self.source, self.special_tokens, self.tool_use.source if self.tool_use else None)

    def used_with(self, tools: Any) -> ChatTemplate:
        """The template for a conversation with `tools`, or with None."""
        return self if tools is None or self.tool_use is None else self.tool_use

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **values: Any) -> str:
        """The conversation's text, by default including the generation prompt.

        Raises ChatTemplateError for messages that the template refuses, and for a rendering that exceeds the limits.
        """
        if (other := self.used_with(values.get("tools"))) is not self:
            return other.render(messages, add_generation_prompt, **values)
        # Templates check `tools is none`: transformers passes None if there are no tools.
        names = {"tools": None, "documents": None, **self.special_tokens, **values}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return str(_result(self._worker.ask(_pickled(names))))
        except ChatTemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error
        except WorkerEnded as error:
            raise ChatTemplateError(f"the model's chat template fails on these messages: {error}") from error


def _pickled(variables: dict[str, Any]) -> bytes:
    try:
        data = pickle.dumps(variables, protocol=pickle.HIGHEST_PROTOCOL)
    except (RecursionError, TypeError, AttributeError, pickle.PicklingError) as error:
        raise ChatTemplateError(f"they cannot be passed to it ({type(error).__name__}: {error})"[:300]) from error
    if len(data) > MOST_INPUT_BYTES:
        raise ChatTemplateError(f"they have {len(data)} bytes, more than {MOST_INPUT_BYTES}")
    return data


def _result(answer: bytes) -> Any:
    succeeded, result = from_json(answer)
    if not succeeded:
        raise ChatTemplateError(result)
    return result


def load_chat_template(folder: Path, file: str = "") -> ChatTemplate | None:
    """The folder's templates `default` and `tool_use`, from its files or `tokenizer_config.json`; None without any.

    For an adapter, those of its `tokenizer_folder`. A `file`, or `chatml`, replaces all of them. Raises UserError for a
    template that cannot be read.
    """
    if file == CHATML:
        return make_chat_template(CHATML_SOURCE, {}, CHATML)
    folder = tokenizer_folder(folder)
    settings: dict[str, Any] = {}
    for name in SETTINGS_FILES:
        if (folder / name).is_file():
            try:
                # A null token does not override the other file.
                settings |= {k: v for k, v in json.loads(read_text(folder / name)).items() if v is not None}
            except (ValueError, AttributeError, RecursionError) as error:
                raise UserError(f"{folder / name}: not a JSON object ({error}); fix it or remove it") from error
    if file and not Path(file).is_file():
        raise UserError(f"{file}: no such file; give a chat template with --template FILE, or leave it out")
    sources = {"default": read_text(Path(file))} if file else _in_files(folder) or _in_settings(folder, settings)
    if not sources:
        return None
    if "default" not in sources:
        raise UserError(f"{folder}: has chat templates, but none named default ({', '.join(sources)}); {FIX}")
    special = {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
    tokens = {k: v for k, v in special.items() if isinstance(v, str)}
    return make_chat_template(sources["default"], tokens, file or str(folder), sources.get("tool_use"))


def carry_template(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Makes the tokenizer save `template` instead of its folder's templates."""
    for name in [name for name in tokenizer.carried if name.startswith(f"{MORE_TEMPLATES}/")]:
        del tokenizer.carried[name]
    tokenizer.carried[CHAT_TEMPLATE_FILE] = template.source


def _in_files(folder: Path) -> dict[str, str]:
    """The folder's template files, by name."""
    files = {"default": folder / CHAT_TEMPLATE_FILE}
    files |= {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    return {name: read_text(path) for name, path in files.items() if path.is_file()}


def _in_settings(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The template, or the list of templates, in the tokenizer's settings, by name."""
    setting = settings.get("chat_template")
    if isinstance(setting, list):
        named = [(t.get("name"), t.get("template")) for t in setting if isinstance(t, dict)]
        texts = {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
        if len(texts) < len(setting):
            raise UserError(f"{folder}: chat_template is a list, but not of named templates; {FIX}")
        return texts
    if setting is not None and not isinstance(setting, str):
        raise UserError(f"{folder}: chat_template is a {type(setting).__name__}, not a text; {FIX}")
    return {} if setting is None else {"default": setting}


def make_chat_template(
    source: str, special_tokens: dict[str, str], where: str, tool_use: str | None = None
) -> ChatTemplate:
    """Raises UserError, naming `where`, for a source that is not a template."""
    try:
        return ChatTemplate(source, special_tokens, tool_use)
    except ChatTemplateError as error:
        raise UserError(f"{where}: the chat template cannot be read ({error}); fix it or remove it") from error


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
        raw = decoded(named, raw)
    if raw is not None and not isinstance(raw, Mapping):
        raise ChatTemplateError(f"{named} is not an object")
    values = {name: value for name, value in (raw or {}).items() if value is not None}
    known = readable_values(template)
    if unread := next((name for name in values if name not in known), None):
        hint = closest(unread, known) or " Leave it out"
        raise ChatTemplateError(f"{named} has {unread!r:.60}, which the chat template does not read.{hint}")
    return values


def decoded(named: str, text: str) -> Any:
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
