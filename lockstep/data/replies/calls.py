"""The calls in a reply's text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.data.replies.call_json import read_json
from lockstep.data.replies.formats import ToolFormat
from lockstep.data.replies.tagged_calls import Parameters, glm_call, qwen3_xml_call
from lockstep.tool_call import ToolCall

MOST_CALLS = 32
"""Maximum number of calls in a reply; further ones are ignored."""
Marks = Sequence[tuple[int, str]]
"""Position and name of each of a format's marks in a text; text that only looks like a mark is not one."""


@dataclass(frozen=True)
class WrittenCall:
    """A call, and how it is written."""

    call: ToolCall
    arguments: str = ""
    """The JSON of its arguments; as the model wrote it, where they are JSON in the text."""
    begin: int = 0
    """Where it begins in the text of all calls."""
    end: int = 0
    """From where on the next one is searched for."""
    text: str = ""
    """If it cannot be parsed, all of its text."""


@dataclass(frozen=True)
class CallText:
    """A reply's text from the first call on."""

    text: str
    marks: Marks
    format: ToolFormat
    parameters: Parameters = field(default_factory=dict)

    def mark(self, name: str, place: int) -> int:
        """Position of the first such mark at or after `place`; -1 if there is none."""
        return next((where for where, mark in self.marks if where >= place and mark == name), -1)

    @property
    def opening(self) -> str:
        """The mark that begins each call."""
        return self.format.marks[1 if self.format.family == "deepseek" else 0]


def calls_in(text: CallText) -> tuple[WrittenCall, ...]:
    """The calls in order. One that cannot be parsed has a `problem`."""
    calls: list[WrittenCall] = []
    place = 0
    while len(calls) <= MOST_CALLS and (found := next_call(text, place)) is not None:
        calls.append(found)
        place = found.end
    if not calls:
        calls.append(WrittenCall(ToolCall("", problem=_nothing(text)), end=len(text.text)))
    ends = [call.begin for call in calls[1:]] + [len(text.text)]
    return bounded(
        [
            WrittenCall(c.call, c.arguments, c.begin, c.end, text.text[c.begin : end].strip()) if c.call.problem else c
            for c, end in zip(calls, ends, strict=True)
        ]
    )


def bounded(calls: Sequence[WrittenCall]) -> tuple[WrittenCall, ...]:
    """The first `MOST_CALLS` calls, and one call with a problem in place of any others."""
    if len(calls) <= MOST_CALLS:
        return tuple(calls)
    problem = f"there are more than {MOST_CALLS} calls in the reply; the rest is not run"
    rest = calls[MOST_CALLS]
    return (*calls[:MOST_CALLS], WrittenCall(ToolCall("", problem=problem), "", rest.begin, rest.end, rest.text))


def next_call(text: CallText, place: int) -> WrittenCall | None:
    """The first call at or after `place`; None if there is none."""
    match text.format.family:
        case "llama3":
            return _llama3(text, place)
        case "mistral":
            return _mistral(text, place)
    begin = text.mark(text.opening, place)
    if begin < 0:
        return None
    match text.format.family:
        case "qwen3":
            return _qwen3(text, begin)
        case "deepseek":
            return _deepseek(text, begin)
    return _tagged(text, begin)


def head(text: CallText, place: int) -> tuple[str, int] | None:
    """The name of the call at or after `place`, and where the JSON object of its arguments begins; None if that is not
    known (yet): also if the arguments precede the name, or are not JSON. More text never changes what is known."""
    family = text.format.family
    begin = place if family in ("llama3", "mistral") else text.mark(text.opening, place)
    if begin < 0 or family in ("qwen3_xml", "glm"):
        return None
    match family:
        case "deepseek":
            return _deepseek_head(text, begin)
        case "mistral" if match := NAMED_CALL.match(text.text, begin):
            return match["name"], match.end()
        case "mistral":
            match = HEADS["mistral"].match(text.text, begin)
        case "llama3":
            match = HEADS["llama3"].match(text.text, begin)
        case _:
            match = HEADS["qwen3"].match(text.text, begin + len(text.opening))
    if match is None:
        return None
    name, _, problem = read_json(match["name"], 0)
    return None if problem or not name else (name, match.end())


NAME_FIRST = r'\{\s*%s"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"%s"\s*:\s*(?=\{)'
HEADS = {
    "qwen3": re.compile(r"\s*" + NAME_FIRST % ("", "arguments")),
    "llama3": re.compile(
        r"\s*(?:<\|python_tag\|>\s*)?" + NAME_FIRST % (r'(?:"type"\s*:\s*"function"\s*,\s*)?', "parameters")
    ),
    "mistral": re.compile(r"(?:\s*\]?\s*\[TOOL_CALLS\]\s*\[?|\s*,)\s*" + NAME_FIRST % ("", "arguments")),
}
NAMED_CALL = re.compile(
    r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*[^\s\[\]{}]*\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)


def call_to(name: str, text: str, missing: str = "") -> WrittenCall:
    """A call whose arguments are the whole `text`. missing: the end mark that the reply lacks, if any."""
    arguments, end, problem = read_json(text, 0)
    if not problem and text[end:].strip():
        problem = "only the JSON of its arguments may be in a call"
    call = _named(name, arguments, problem or (missing and f"the reply ends before {missing}"))
    return WrittenCall(call, "" if call.problem else text[:end].lstrip(), text=text.strip() if call.problem else "")


def _qwen3(text: CallText, opening: int) -> WrittenCall:
    begin, closing = opening + len(text.opening), text.format.closes
    # The end of the JSON is found by parsing: a string in it may contain the closing tag.
    value, end, problem = read_json(text.text, begin)
    call = ToolCall("", problem=problem) if problem else _call(value, text.format)
    close = text.mark(closing, end)
    if not call.problem and (close < 0 or text.text[end:close].strip()):
        problem = f"the reply ends before {closing}" if close < 0 else f"only {closing} may follow a call's JSON"
        call = ToolCall(call.name, problem=problem)
    return WrittenCall(call, _arguments(text, opening, call), opening, max(close, begin))


def _deepseek_head(text: CallText, opening: int) -> tuple[str, int] | None:
    parts = _deepseek_parts(text, opening)
    if parts is None:
        return None
    name, start, _ = parts
    while start < len(text.text) and text.text[start].isspace():
        start += 1
    return (name, start) if name and text.text[start : start + 1] == "{" else None


FENCED = re.compile(r"\s*([^\s{][^\n]*?)[ \t\r]*\n\s*```(?:json)?")


def _deepseek_parts(text: CallText, opening: int) -> tuple[str, int, str] | None:
    """A call's name, where the JSON begins, and the pattern of what follows it; None without a separator."""
    separator = text.format.marks[2]
    begin = opening + len(text.opening)
    middle, following = text.mark(separator, begin), text.mark(text.opening, begin)
    if middle < 0 or 0 <= following < middle:
        return None
    start = middle + len(separator)
    # If the name is on a line of its own, before a fence of JSON, the type `function` precedes the separator.
    if fenced := FENCED.match(text.text, start):
        return fenced[1], fenced.end(), r"\s*```\s*"
    return text.text[begin:middle].strip(), start, r"\s*"


def _deepseek(text: CallText, opening: int) -> WrittenCall:
    begin = opening + len(text.opening)
    parts = _deepseek_parts(text, opening)
    if parts is None:
        problem = f"a call must have a name and its arguments, with {text.format.marks[2]} between"
        return WrittenCall(ToolCall("", problem=problem), "", opening, begin)
    name, start, after = parts
    closing = text.format.closes
    arguments, end, problem = read_json(text.text, start)
    close = text.mark(closing, end)
    if not problem and (close < 0 or not re.fullmatch(after, text.text[end:close])):
        problem = f"the reply ends before {closing}" if close < 0 else f"only {closing} may follow a call's JSON"
    call = _named(name, arguments, problem)
    return WrittenCall(call, _arguments(text, opening, call), opening, max(close, begin))


def _tagged(text: CallText, opening: int) -> WrittenCall:
    begin, closing = opening + len(text.opening), text.format.closes
    close = text.mark(closing, begin)
    while close >= 0 and not closes_tagged(text.text[begin:close], text.format):
        after, following = close + len(closing), text.mark(text.opening, close)
        if following >= 0 and not text.text[after:following].strip():  # another call
            break
        close = text.mark(closing, after)
    if close < 0:
        return WrittenCall(ToolCall("", problem=f"the reply ends before {closing}"), "", opening, begin)
    read = glm_call if text.format.family == "glm" else qwen3_xml_call
    call = read(text.text[begin:close], text.parameters)
    arguments = "" if call.problem else json.dumps(call.arguments, ensure_ascii=False)
    return WrittenCall(call, arguments, opening, close)


def closes_tagged(body: str, format: ToolFormat) -> bool:
    """Whether a closing mark after this text ends the call: one within a value does not."""
    if format.family == "glm" and "<arg_key>" not in body:
        return True
    return body.rstrip().endswith("</arg_value>" if format.family == "glm" else "</function>")


BEGINS_CALL = re.compile(r'\{\s*"(name|parameters|type|function)"\s*:')
"""JSON may also be an answer; a call has a name."""


def _llama3(text: CallText, place: int) -> WrittenCall | None:
    begin, whole = place, text.text.rstrip()
    while begin < len(whole) and whole[begin].isspace():
        begin += 1
    mark = text.format.marks[0]
    if place == 0 and whole.startswith(mark, begin):
        begin += len(mark)
    if begin >= len(whole):
        return None
    value, end, problem = read_json(whole, begin)
    call = ToolCall("", problem=problem) if problem else _call(value, text.format)
    left = whole[end:].lstrip()
    if not call.problem and left and not left.startswith(";"):
        call = ToolCall(call.name, problem="a call must be the only content of the reply")
    after = len(whole) if call.problem else len(whole) - len(left.removeprefix(";").lstrip())
    return WrittenCall(call, _arguments(text, place, call), place, after)


def _mistral(text: CallText, place: int) -> WrittenCall | None:
    rest = text.text[place:]
    stripped = rest.lstrip()
    if place and stripped.startswith(","):  # the next one of a list
        begin = place
        start = len(text.text) - len(stripped) + 1
    elif (begin := text.mark(text.opening, place)) >= 0:
        start = begin + len(text.opening)
    else:
        return None
    if found := NAMED_CALL.match(text.text, begin):
        arguments, end, problem = read_json(text.text, found.end())
        call = _named(found["name"], arguments, problem)
    else:
        item = re.compile(r"\s*\[?").match(text.text, start)
        assert item is not None  # both parts are optional
        value, end, problem = read_json(text.text, item.end())
        call = ToolCall("", problem=problem) if problem else _call(value, text.format)
    if call.problem:  # what follows within the list cannot be told apart
        following = text.mark(text.opening, start)
        end = len(text.text) if following < 0 else following
    return WrittenCall(call, _arguments(text, begin, call), begin, end)


def _arguments(text: CallText, place: int, call: ToolCall) -> str:
    """The JSON of a call's arguments, as it is written if it is where `head` expects it."""
    if call.problem:
        return ""
    if found := head(text, place):
        value, end, problem = read_json(text.text, found[1])
        if found[0] == call.name and not problem and value == call.arguments:
            return text.text[found[1] : end]
    return json.dumps(call.arguments, ensure_ascii=False)


def _nothing(text: CallText) -> str:
    match text.format.family:
        case "deepseek":
            return f"there is no {text.opening} after {text.format.marks[0]}"
        case "llama3":
            return f"there is no JSON after {text.format.marks[0]}"
    return "there is no call"


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
