"""Calls of tools as models write them: which format a chat template teaches, and reading a reply."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.rl.conversations.protocol import ToolCall

MOST_CALLS = 32
"""In a reply. What a model writes beyond that is not read."""
DEEPEST = 32
"""Objects and lists within each other in the arguments of a call."""
ENDS = ("<|eom_id|>", "<|eot_id|>", "<|im_end|>")


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls."""

    family: Literal["qwen3", "llama3"]
    arguments: str
    """The key that the arguments stand under, beside `name`."""


QWEN3 = ToolFormat("qwen3", "arguments")
"""`<tool_call>` with a JSON object and `</tool_call>`, any number of them, after reasoning and text. Qwen2.5 too."""
LLAMA3 = ToolFormat("llama3", "parameters")
"""JSON alone, or after `<|python_tag|>`: Llama 3.1 and later; several are divided by semicolons."""


def tool_format(template_source: str) -> ToolFormat | None:
    """The format that a chat template writes calls in; None where it knows of no tools, or writes them otherwise."""
    # A template holds JSON in strings of either kind of quotes, so those of the JSON may be escaped.
    keys = set(re.findall(r'\\?"(name|arguments|parameters)\\?"', template_source))
    if "<tool_call>" in template_source and {"name", "arguments"} <= keys:
        # Others put tags of their own, or the name alone, between these two.
        return None if re.search(r"<function=|<arg_key>|<arg_value>", template_source) else QWEN3
    if "<|start_header_id|>" in template_source and {"name", "parameters"} <= keys:
        return LLAMA3
    return None


def parse_calls(text: str, format: ToolFormat) -> tuple[ToolCall, ...]:
    """The calls in a reply, in order. What cannot be read is a call with a `problem`; nothing is raised.

    What stands before the first `</think>` is reasoning: no call is read there.
    """
    _, closed, after = text.partition("</think>")
    if not closed and text.lstrip().startswith("<think>"):
        return ()  # cut within the reasoning
    spoken = (after if closed else text).rstrip()
    for end in ENDS:
        spoken = spoken.removesuffix(end)
    calls = _qwen3(spoken) if format is QWEN3 else _llama3(spoken.strip())
    if len(calls) > MOST_CALLS:
        problem = f"there are more than {MOST_CALLS} calls in the reply; the rest is not run"
        calls = [*calls[:MOST_CALLS], ToolCall("", problem=problem)]
    return tuple(calls)


def _qwen3(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    place = text.find("<tool_call>")
    while place >= 0 and len(calls) <= MOST_CALLS:
        begin = place + len("<tool_call>")
        # The JSON says where it ends: a text in it may hold the closing tag.
        call, end = _read(text, begin, QWEN3)
        close = text.find("</tool_call>", end)
        if not call.problem and (close < 0 or text[end:close].strip()):
            problem = (
                "the reply ends before </tool_call>" if close < 0 else "only </tool_call> may follow a call's JSON"
            )
            call = ToolCall(call.name, problem=problem)
        calls.append(call)
        place = text.find("<tool_call>", max(close, begin))
    return calls


def _llama3(text: str) -> list[ToolCall]:
    tagged = text.startswith("<|python_tag|>")
    text = text.removeprefix("<|python_tag|>").strip()
    # JSON may be an answer, too: a call has a name.
    if not tagged and not re.match(r'\{\s*"(name|parameters|type|function)"\s*:', text):
        return []
    calls: list[ToolCall] = []
    end = 0
    while end < len(text) and len(calls) <= MOST_CALLS:
        call, end = _read(text, end, LLAMA3)
        calls.append(call)
        if call.problem:
            break
        left = text[end:].lstrip()
        if left and not left.startswith(";"):
            calls[-1] = ToolCall(call.name, problem="a call must be the only content of the reply")
            break
        end = len(text) - len(left.removeprefix(";").lstrip())
    return calls or [ToolCall("", problem="there is no JSON after <|python_tag|>")]


class _Refused(ValueError):
    """JSON that Python reads, but no call."""


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


def _read(text: str, place: int, format: ToolFormat) -> tuple[ToolCall, int]:
    """The call whose JSON begins at `place`, after white space, and where it ends, as far as that is known."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        value, end = _DECODER.raw_decode(text, place)
    except _Refused as error:
        return ToolCall("", problem=f"the call cannot be read: {error}"), place
    except json.JSONDecodeError as error:
        where = f"at character {error.pos - place + 1} of it"
        return ToolCall("", problem=f"the call is not valid JSON: {error.msg} {where}"), place
    except ValueError:  # Python refuses integers of thousands of digits
        return ToolCall("", problem="the call cannot be read: a number has too many digits"), place
    except RecursionError:
        return ToolCall("", problem=f"the call is nested deeper than {DEEPEST} levels"), place
    return _call(value, format), end


def _call(value: Any, format: ToolFormat) -> ToolCall:
    form = f'{{"name": "…", "{format.arguments}": {{…}}}}'
    if not isinstance(value, dict):
        return ToolCall("", problem=f"a call must be a JSON object, {form}")
    if _depth(value) > DEEPEST:
        return ToolCall("", problem=f"the call is nested deeper than {DEEPEST} levels")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # "\\ud800" is JSON, but half of a surrogate pair has no UTF-8: no tokenizer and no file takes it.
        return ToolCall("", problem="a text in the call has half of a surrogate pair (\\ud800 to \\udfff)")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", problem=f'a call must have a "name": {form}')
    arguments = value.get(format.arguments)
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f'a call must have "{format.arguments}", a JSON object: {form}')
    return ToolCall(name, arguments)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return depth
