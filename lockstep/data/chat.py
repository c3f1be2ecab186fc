"""Renders chat messages as text with the chat template in the model's folder."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.data.chatml import CHATML, SOURCE
from lockstep.data.tokenizer import CHAT_TEMPLATE_FILE, MORE_TEMPLATES, Tokenizer, read_text, tokenizer_folder
from lockstep.data.workers import python_path
from lockstep.errors import UserError

SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")
FIX = "fix it, remove it or put a chat_template.jinja next to it"

MEMORY_BYTES, SECONDS = 2**30, 5.0
"""Limits of the rendering process: total memory, and CPU time for compiling or for one rendering."""
LONGEST_TEXT, MOST_INPUT_BYTES = 2**26, 2**26


# Delimiters around the contents of `{% generation %}`; no conversation contains them.
BEGINS, ENDS = "\0<assistant\0", "\0assistant>\0"


class ChatTemplateError(ValueError):
    """These messages do not fit the template."""


class ChatTemplate:
    """Renders as transformers' `apply_chat_template` does: the same environment, functions and special tokens.

    The template is compiled and rendered in a separate process (`template_process.py`), which is started once, and
    again after a rendering exceeded its limits. Thread-safe: renderings run one at a time. `tool_use`: the template
    used instead for conversations with tools.

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
        self._lock = threading.Lock()
        self._process: _Process | None = None
        with self._lock:
            self._start()

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
            with self._lock:
                process = self._process or self._start()
                try:
                    return process.ask(names)
                except _ProcessEnded:
                    self._process = None
                    raise
        except ChatTemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error
        except _ProcessEnded as error:
            raise ChatTemplateError(f"the model's chat template fails on these messages: {error}") from error

    def _start(self) -> _Process:
        process = _Process()
        try:
            names = process.ask((self.source, MEMORY_BYTES, SECONDS, LONGEST_TEXT))
        except _ProcessEnded as error:
            raise ChatTemplateError(str(error)) from error
        self.variables = frozenset(json.loads(names))
        self._process = process
        return process


def load_chat_template(folder: Path, file: str = "") -> ChatTemplate | None:
    """The folder's templates `default` and `tool_use`, from its files or `tokenizer_config.json`; None without any.

    For an adapter, those of its `tokenizer_folder`. A `file`, or `chatml`, replaces all of them. Raises UserError for a
    template that cannot be read.
    """
    if file == CHATML:
        return make_chat_template(SOURCE, {}, CHATML)
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


class _ProcessEnded(Exception):
    """The rendering process ended; the message says why."""


class _Process:
    """A running `template_process.py`. It ends with this object, or when its pipe closes, however its parent died."""

    def __init__(self) -> None:
        # -P leaves the working folder out of the path: files in it may shadow modules.
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("template_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        self._close = weakref.finalize(self, _end, self._child)

    def ask(self, request: Any) -> str:
        """Sends a request and returns the text of the answer.

        Raises ChatTemplateError for an error in the template, _ProcessEnded if there is no answer.
        """
        try:
            data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        except (RecursionError, TypeError, AttributeError, pickle.PicklingError) as error:
            raise ChatTemplateError(f"they cannot be passed to it ({type(error).__name__}: {error})"[:300]) from error
        if len(data) > MOST_INPUT_BYTES:
            raise ChatTemplateError(f"they have {len(data)} bytes, more than {MOST_INPUT_BYTES}")
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(data)
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # reported when the answer is missing
        head = self._child.stdout.read(9)
        length = int.from_bytes(head[1:], "little")
        # A character is at most four bytes of UTF-8.
        text = self._child.stdout.read(length) if len(head) == 9 and length <= 4 * LONGEST_TEXT else b""
        if len(head) < 9 or len(text) < length:
            raise self._ended()
        answer = text.decode(errors="surrogatepass")
        if head[:1] != b"=":
            raise ChatTemplateError(answer)
        return answer

    def _ended(self) -> _ProcessEnded:
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=1)
        self._close()
        if self._child.returncode == -signal.SIGXCPU:
            return _ProcessEnded(f"it takes more than {SECONDS:g} seconds")
        return _ProcessEnded(f"its process ended with code {self._child.returncode}; out of memory?")


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            # Unflushed data was for the process that has ended.
            with suppress(BrokenPipeError):
                pipe.close()
