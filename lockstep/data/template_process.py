"""The process that compiles and renders a chat template, with time and memory limits.

A template is a program that comes with a model: jinja's sandbox keeps it from files and Python's internals, but not
from running for hours or exhausting memory. This file is run as a script, not imported: it needs only jinja2 and the
standard library, so the process starts in a fraction of a second.

Requests arrive pickled on standard input: first (source, bytes of memory, seconds of CPU time, maximum characters of a
text), then the variables of each rendering. An answer on standard output is `=` or `!`, eight bytes of length, and JSON
of the source's variables, the text, or the error.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def serve() -> None:
    """Answers requests until the pipe closes or the time limit ends the process."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    source, memory, seconds, longest = pickle.load(requests)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where the system does not support this limit, as on macOS, only the time limit applies.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    environment, template = make_environment(), None
    variables: Any = None
    while True:
        _extend_time_limit(seconds)
        try:
            if template is None:
                names = meta.find_undeclared_variables(environment.parse(source))
                template, text = environment.from_string(source), json.dumps(sorted(names))
            else:
                text = template.render(variables)
                if len(text) > longest:
                    raise jinja2.TemplateError(f"its text has more than {longest} characters")
            kind, answer = b"=", text.encode(errors="surrogatepass")
        except MemoryError:
            text, kind, answer = "", b"!", f"it needs more than {memory // 2**20} MiB of memory".encode()
        except RecursionError:
            text, kind, answer = "", b"!", b"it is nested too deeply"
        except Exception as error:  # a template is a program, which can raise anything
            text, kind, answer = "", b"!", f"{error}"[:1000].encode(errors="replace")
        try:
            answers.write(kind + len(answer).to_bytes(8, "little") + answer)
            answers.flush()
        except BrokenPipeError:
            return  # the parent has ended
        text, answer = "", b""
        try:
            variables = pickle.load(requests)
        except EOFError:
            return


def _extend_time_limit(seconds: float) -> None:
    """Lets the process use `seconds` more of CPU time; the system counts whole seconds."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(used + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


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


if __name__ == "__main__":
    serve()
