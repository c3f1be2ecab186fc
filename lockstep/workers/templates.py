"""Compiles and renders a chat template in a worker process, with time and memory limits.

A template is a program that comes with a model: jinja's sandbox keeps it from files and Python's internals, but not
from running for hours or exhausting memory. Only jinja2 and the standard library are needed, so the process starts in a
fraction of a second.
"""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lockstep.workers.messages import to_json

MEMORY_BYTES = 2**30
"""Limit of the process."""
LONGEST_TEXT = 2**26
"""Maximum number of characters of a text."""


class Renderer:
    """Answers pickled requests: first a template's source, with the names of the variables that it reads; then the
    variables of each rendering, with its text. An answer is JSON of [whether it succeeded, the result or the error]."""

    def __init__(self) -> None:
        self._environment = make_environment()
        self._template: jinja2.Template | None = None

    def __call__(self, request: bytes) -> bytes:
        try:
            return to_json([True, self._result(pickle.loads(request))])
        except MemoryError:
            problem = f"it needs more than {MEMORY_BYTES // 2**20} MiB of memory"
        except RecursionError:
            problem = "it is nested too deeply"
        except Exception as error:  # a template is a program, which can raise anything
            problem = f"{error}"[:1000]
        return to_json([False, problem])

    def _result(self, request: Any) -> Any:
        if self._template is None:
            names = meta.find_undeclared_variables(self._environment.parse(request))
            self._template = self._environment.from_string(request)
            return sorted(names)
        text = self._template.render(request)
        if len(text) > LONGEST_TEXT:
            raise jinja2.TemplateError(f"its text has more than {LONGEST_TEXT} characters")
        return text


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers' `apply_chat_template`: the same options, functions and blocks."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class GenerationBlock(Extension):
    """`{% generation %}`, with which templates mark the assistant's text; by itself it does not change the output.

    As in transformers it is a call block: variables set in it are not visible after it.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks: list[nodes.Expr] = [
            nodes.Name(name, "load", lineno=line) for name in ("generation_begins", "generation_ends")
        ]
        return nodes.CallBlock(self.call_method("_between", marks), [], [], body).set_lineno(line)

    def _between(self, begins: Any, ends: Any, caller: Any) -> str:
        # A marker that is not passed is undefined and renders as nothing.
        return f"{begins}{caller()}{ends}"


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
