"""Chat messages to text, with the template in the model's folder."""

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
"""Limits of the process that renders: its total memory, and the CPU time for compiling or for one rendering."""
LONGEST_TEXT, MOST_INPUT_BYTES = 2**26, 2**26


# Around the contents of `{% generation %}`; no conversation contains them.
BEGINS, ENDS = "\0<assistant\0", "\0assistant>\0"


class ChatTemplateError(ValueError):
    """These messages do not fit the template."""


class ChatTemplate:
    """Renders as transformers' `apply_chat_template` does: the same environment, functions and special tokens.

    The template is compiled and rendered in a separate process (`template_process.py`), which is started once, and
    again after a rendering that exceeded its limits. Any thread can render; it waits for the others. `tool_use`: the
    template that takes its place for conversations with tools.

    Raises ChatTemplateError for a source that is not a template, or whose compilation exceeds the limits.
    """

    variables: frozenset[str]
    """Variables that the source reads and does not set itself."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_use: str | None = None):
        self.source = source
        self.special_tokens = special_tokens
        self.marks = re.search(r"\{%[-+]?\s*generation\b", source) is not None
        """Whether it marks what the assistant says with `{% generation %}`."""
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
        """The conversation's text, by default up to where the assistant's turn begins.

        Raises ChatTemplateError for messages that the template refuses, and for a rendering that exceeds the limits.
        """
        if (other := self.used_with(values.get("tools"))) is not self:
            return other.render(messages, add_generation_prompt, **values)
        # Templates check `tools is none`, which is how transformers renders without them.
        names = {"tools": None, "documents": None, **self.special_tokens, **values}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            with self._lock:
                process = self._process or self._start()
                try:
                    return process.ask(names)
                except _Ended:
                    self._process = None
                    raise
        except ChatTemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error
        except _Ended as error:
            raise ChatTemplateError(f"the model's chat template fails on these messages: {error}") from error

    def _start(self) -> _Process:
        process = _Process()
        try:
            names = process.ask((self.source, MEMORY_BYTES, SECONDS, LONGEST_TEXT))
        except _Ended as error:
            raise ChatTemplateError(str(error)) from error
        self.variables = frozenset(json.loads(names))
        self._process = process
        return process


def load_chat_template(folder: Path, file: str = "") -> ChatTemplate | None:
    """The folder's templates, `default` and `tool_use`, from its files or `tokenizer_config.json`; None without any.

    They are those of the `tokenizer_folder`. A `file`, or `chatml`, if given, takes the place of all. Raises
    UserError for a template that cannot be read.
    """
    if file == CHATML:
        return make_chat_template(SOURCE, {}, CHATML)
    folder = tokenizer_folder(folder)
    settings: dict[str, Any] = {}
    for name in SETTINGS_FILES:
        if (folder / name).is_file():
            try:
                # A token that is null is not given by this file.
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
    """Saves `template` with the tokenizer from now on, in place of its folder's."""
    for name in [name for name in tokenizer.carried if name.startswith(f"{MORE_TEMPLATES}/")]:
        del tokenizer.carried[name]
    tokenizer.carried[CHAT_TEMPLATE_FILE] = template.source


def _in_files(folder: Path) -> dict[str, str]:
    """The templates that the folder has in files of their own, by name."""
    files = {"default": folder / CHAT_TEMPLATE_FILE}
    files |= {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    return {name: read_text(path) for name, path in files.items() if path.is_file()}


def _in_settings(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The template in the tokenizer's settings, or the list of them, by name."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = [(t.get("name"), t.get("template")) for t in found if isinstance(t, dict)]
        texts = {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
        if len(texts) < len(found):
            raise UserError(f"{folder}: chat_template is a list, but not of templates by name; {FIX}")
        return texts
    if found is not None and not isinstance(found, str):
        raise UserError(f"{folder}: chat_template is a {type(found).__name__}, not a text; {FIX}")
    return {} if found is None else {"default": found}


def make_chat_template(
    source: str, special_tokens: dict[str, str], where: str, tool_use: str | None = None
) -> ChatTemplate:
    """Raises UserError, naming `where`, for a source that is not a template."""
    try:
        return ChatTemplate(source, special_tokens, tool_use)
    except ChatTemplateError as error:
        raise UserError(f"{where}: the chat template cannot be read ({error}); fix it or remove it") from error


class _Ended(Exception):
    """The process that renders has ended: says why."""


class _Process:
    """A running `template_process.py`. It ends with this object, or when its pipe does, however its parent died."""

    def __init__(self) -> None:
        # Without the working folder in the path (-P): files there may have the names of modules.
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("template_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        self._close = weakref.finalize(self, _end, self._child)

    def ask(self, request: Any) -> str:
        """The answer's text. Raises ChatTemplateError for an error in the template, _Ended if there is no answer."""
        try:
            sent = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        except (RecursionError, TypeError, AttributeError, pickle.PicklingError) as error:
            raise ChatTemplateError(f"they cannot be passed to it ({type(error).__name__}: {error})"[:300]) from error
        if len(sent) > MOST_INPUT_BYTES:
            raise ChatTemplateError(f"they have {len(sent)} bytes, more than {MOST_INPUT_BYTES}")
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(sent)
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer says so
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

    def _ended(self) -> _Ended:
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=1)
        self._close()
        if self._child.returncode == -signal.SIGXCPU:
            return _Ended(f"it takes more than {SECONDS:g} seconds")
        return _Ended(f"its process ended with code {self._child.returncode}; out of memory?")


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            # What it still contained was for a process that is gone.
            with suppress(BrokenPipeError):
                pipe.close()
