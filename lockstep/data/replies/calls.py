"""Tool calls: which format a chat template uses, and parsing the calls in a reply's text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.tool_call import ToolCall

MOST_CALLS = 32
"""Maximum number of calls in a reply; further ones are ignored."""
DEEPEST = 32
"""Maximum nesting of objects and lists in a call's arguments."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls."""

    family: Literal["qwen3", "llama3", "deepseek", "gpt_oss"]
    arguments: str = "arguments"
    """The key of the arguments if a call is one JSON object with `name`."""
    marks: tuple[str, ...] = ()
    """The tokens that delimit calls; the first one begins them."""


QWEN3 = ToolFormat("qwen3", marks=("<tool_call>", "</tool_call>"))
"""Any number of `<tool_call>` JSON object `</tool_call>`, after reasoning and text. Also Qwen2.5."""
LLAMA3 = ToolFormat("llama3", "parameters", ("<|python_tag|>",))
"""Only JSON, optionally after `<|python_tag|>`: Llama 3.1 and later; several are separated by semicolons."""
DEEPSEEK = ToolFormat(
    "deepseek",
    marks=(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
)
"""Calls between full-width tokens: DeepSeek V3 and R1 write `function`, separator, name and a fence of JSON, V3.1 and
later write name, separator and JSON."""
GPT_OSS = ToolFormat("gpt_oss")
"""A message to `functions.NAME`; parsed by `channels.py`, since every reply of the family consists of messages."""


def tool_format(template_source: str) -> ToolFormat | None:
    """The format in which a chat template writes calls; None if it has no tools, or uses another format."""
    # Templates have JSON in strings with either kind of quotes, so the quotes of the JSON may be escaped.
    keys = set(re.findall(r'\\?"(name|arguments|parameters)\\?"', template_source))
    if "<tool_call>" in template_source and {"name", "arguments"} <= keys:
        # Other formats put tags of their own, or only the name, between these two.
        return None if re.search(r"<function=|<arg_key>|<arg_value>", template_source) else QWEN3
    if "<|start_header_id|>" in template_source and {"name", "parameters"} <= keys:
        return LLAMA3
    if all(mark in template_source for mark in DEEPSEEK.marks[1:4]):
        return DEEPSEEK
    if "<|channel|>" in template_source and "<|call|>" in template_source:
        return GPT_OSS
    return None


def calls_in(text: str, marks: Sequence[tuple[int, str]], format: ToolFormat) -> tuple[ToolCall, ...]:
    """The calls in a reply's text from the first call on. One that cannot be parsed has a `problem`.

    marks: position and name of each of the format's marks in the text; text that only looks like a mark is not one.
    """
    match format.family:
        case "qwen3":
            calls = _qwen3(text, marks)
        case "deepseek":
            calls = _deepseek(text, marks)
        case _:
            calls = _llama3(text)
    return bounded(calls)


def bounded(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """The first `MOST_CALLS` calls, and one call with a problem in place of any others."""
    if len(calls) <= MOST_CALLS:
        return tuple(calls)
    problem = f"there are more than {MOST_CALLS} calls in the reply; the rest is not run"
    return (*calls[:MOST_CALLS], ToolCall("", problem=problem))


def call_to(name: str, text: str, missing: str = "") -> ToolCall:
    """A call whose arguments are the whole `text`. missing: the end mark that the reply lacks, if any."""
    arguments, end, problem = _json(text, 0)
    if not problem and text[end:].strip():
        problem = "only the JSON of its arguments may be in a call"
    return _named(name, arguments, problem or (missing and f"the reply ends before {missing}"))


def _qwen3(text: str, marks: Sequence[tuple[int, str]]) -> list[ToolCall]:
    opening, closing = QWEN3.marks
    calls: list[ToolCall] = []
    place = _next(marks, opening, 0)
    while place >= 0 and len(calls) <= MOST_CALLS:
        begin = place + len(opening)
        # The end of the JSON is found by parsing: a string in it may contain the closing tag.
        value, end, problem = _json(text, begin)
        call = ToolCall("", problem=problem) if problem else _call(value, QWEN3)
        close = _next(marks, closing, end)
        if not call.problem and (close < 0 or text[end:close].strip()):
            problem = f"the reply ends before {closing}" if close < 0 else f"only {closing} may follow a call's JSON"
            call = ToolCall(call.name, problem=problem)
        calls.append(call)
        place = _next(marks, opening, max(close, begin))
    return calls


def _deepseek(text: str, marks: Sequence[tuple[int, str]]) -> list[ToolCall]:
    _, opening, separator, closing, _ = DEEPSEEK.marks
    calls: list[ToolCall] = []
    place = _next(marks, opening, 0)
    while place >= 0 and len(calls) <= MOST_CALLS:
        begin = place + len(opening)
        middle, following = _next(marks, separator, begin), _next(marks, opening, begin)
        if middle < 0 or 0 <= following < middle:
            calls.append(ToolCall("", problem=f"a call must have a name and its arguments, with {separator} between"))
            place = following
            continue
        name, start, after = text[begin:middle].strip(), middle + len(separator), r"\s*"
        # If the name is on a line of its own, before a fence of JSON, the type `function` precedes the separator.
        fenced = re.compile(r"\s*([^\s{][^\n]*?)[ \t\r]*\n\s*```(?:json)?").match(text, start)
        if fenced:
            name, start, after = fenced[1], fenced.end(), r"\s*```\s*"
        arguments, end, problem = _json(text, start)
        close = _next(marks, closing, end)
        if not problem and (close < 0 or not re.fullmatch(after, text[end:close])):
            problem = f"the reply ends before {closing}" if close < 0 else f"only {closing} may follow a call's JSON"
        calls.append(_named(name, arguments, problem))
        place = _next(marks, opening, max(close, begin))
    return calls or [ToolCall("", problem=f"there is no {opening} after {DEEPSEEK.marks[0]}")]


def _next(marks: Sequence[tuple[int, str]], name: str, place: int) -> int:
    """Position of the first such mark at or after `place`; -1 if there is none."""
    return next((where for where, mark in marks if where >= place and mark == name), -1)


BEGINS_CALL = re.compile(r'\{\s*"(name|parameters|type|function)"\s*:')
"""JSON may also be an answer; a call has a name."""


def _llama3(text: str) -> list[ToolCall]:
    text = text.strip().removeprefix(LLAMA3.marks[0]).strip()
    calls: list[ToolCall] = []
    end = 0
    while end < len(text) and len(calls) <= MOST_CALLS:
        value, end, problem = _json(text, end)
        call = ToolCall("", problem=problem) if problem else _call(value, LLAMA3)
        calls.append(call)
        if call.problem:
            break
        left = text[end:].lstrip()
        if left and not left.startswith(";"):
            calls[-1] = ToolCall(call.name, problem="a call must be the only content of the reply")
            break
        end = len(text) - len(left.removeprefix(";").lstrip())
    return calls or [ToolCall("", problem=f"there is no JSON after {LLAMA3.marks[0]}")]


class _Refused(ValueError):
    """JSON that Python accepts, but a call does not."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise _Refused(f"the key {json.dumps(name[:80])} occurs more than once in an object")
        values[name] = value
    return values


def _constant(name: str) -> Any:
    raise _Refused(f"{name} is not a number in JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise _Refused("a number is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_finite)


def _json(text: str, place: int) -> tuple[Any, int, str]:
    """The JSON value at `place`, after whitespace; where it ends, if known; and what is wrong with it, if anything."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        value, end = _DECODER.raw_decode(text, place)
    except _Refused as error:
        return None, place, f"the call cannot be read: {error}"
    except json.JSONDecodeError as error:
        where = f"at character {error.pos - place + 1} of it"
        return None, place, f"the call is not valid JSON: {error.msg} {where}"
    except ValueError:  # Python refuses integers of thousands of digits
        return None, place, "the call cannot be read: a number has too many digits"
    except RecursionError:
        return None, place, f"the call is nested deeper than {DEEPEST} levels"
    if _depth(value) > DEEPEST:
        return None, end, f"the call is nested deeper than {DEEPEST} levels"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # "\\ud800" is JSON, but half of a surrogate pair has no UTF-8: no tokenizer or file accepts it.
        return None, end, "a text in the call has half of a surrogate pair (\\ud800 to \\udfff)"
    return value, end, ""


def _call(value: Any, format: ToolFormat) -> ToolCall:
    form = f'{{"name": "…", "{format.arguments}": {{…}}}}'
    if not isinstance(value, dict):
        return ToolCall("", problem=f"a call must be a JSON object, {form}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", problem=f'a call must have a "name": {form}')
    arguments = value.get(format.arguments)
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f'a call must have "{format.arguments}", a JSON object: {form}')
    return ToolCall(name, arguments)


def _named(name: str, arguments: Any, problem: str) -> ToolCall:
    """A call whose name is outside its JSON."""
    if not problem and not name:
        problem = "a call must have a name"
    if not problem and not isinstance(arguments, dict):
        problem = "the arguments of a call must be a JSON object"
    return ToolCall(name, problem=problem) if problem else ToolCall(name, arguments)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return depth
