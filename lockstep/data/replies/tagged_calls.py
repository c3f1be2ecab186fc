"""Calls whose arguments are tags around keys and values: Qwen3.5's and GLM's. Only a tool's schema tells the types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.data.replies.call_json import read_json
from lockstep.tool_call import ToolCall

FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
# A value may contain the closing tag: only one that another parameter or the end follows is the value's end.
PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL)
Parameters = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""
ORDER = ("null", "integer", "number", "boolean", "object", "array")
"""Types other than strings, in the order in which a value is taken for one."""
NAMED = {"true": True, "false": False}


def qwen3_xml_call(body: str, parameters: Parameters) -> ToolCall:
    """body: what is between `<tool_call>` and `</tool_call>`."""
    match = FUNCTION.fullmatch(body)
    if not match:
        return ToolCall("", problem="a call must be <function=NAME>…</function>")
    return _call(match[1].strip(), match[2], PARAMETER, parameters, "<parameter=KEY>…</parameter>")


def glm_call(body: str, parameters: Parameters) -> ToolCall:
    """body: what is between `<tool_call>` and `</tool_call>`."""
    name, tag, pairs = body.partition("<arg_key>")
    form = "<arg_key>…</arg_key> and <arg_value>…</arg_value>"
    return _call(name.strip(), tag + pairs, PAIR, parameters, form)


def _call(name: str, text: str, pattern: re.Pattern[str], parameters: Parameters, form: str) -> ToolCall:
    if not name:
        return ToolCall("", problem="a call must have a name")
    arguments: dict[str, Any] = {}
    end = 0
    schema = parameters.get(name, {})
    for match in _consecutive(pattern, text):
        key, end = match[1].strip(), match.end()
        if key in arguments:
            return ToolCall(name, problem=f"the argument {json.dumps(key[:80])} occurs more than once")
        arguments[key] = typed(match[2], schema, key)
    if text[end:].strip():
        return ToolCall(name, problem=f"only {form} may be in a call")
    return ToolCall(name, arguments)


def _consecutive(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    place = 0
    while match := pattern.match(text, place):
        yield match
        place = match.end()


def typed(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """An argument's value: a string if the schema says so, else JSON if it is; a string if it is neither."""
    return read_value(text, argument_types(schema, key))


def read_value(text: str, types: set[str]) -> Any:
    """The value of a text. types: those that the schema allows; empty if it does not say."""
    stripped = text.strip()
    lower = stripped.lower()
    # Templates write Python's True and None.
    value, end, problem = NAMED.get(lower), len(stripped), ""
    if value is None and lower not in ("null", "none"):
        value, end, problem = read_json(stripped, 0)
    if problem or end < len(stripped):
        return text
    # Of no type that the schema has: the tool's own check says so better than a string would.
    is_other = not any(_is_of(value, kind) for kind in ORDER if kind in types)
    return text if "string" in types and is_other else value


def _is_of(value: Any, kind: str) -> bool:
    match kind:
        case "null":
            return value is None
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "object":
            return isinstance(value, dict)
    return isinstance(value, list)


def argument_types(root: Mapping[str, Any], key: str) -> set[str]:
    """The types that the schema `root` of all arguments allows for one of them; empty if it does not say."""
    properties = chain(root)[-1].get("properties")
    return types_of(properties.get(key), root) if isinstance(properties, Mapping) else set()


def types_of(
    schema: Any, root: Mapping[str, Any], depth: int = 0, known: dict[int, set[str]] | None = None
) -> set[str]:
    """The types that a schema within `root` allows; empty if it does not say. known: those of schemas that have been
    seen, by their ids: references may lead to one in more ways than could be followed."""
    known = {} if known is None else known
    if not isinstance(schema, Mapping) or depth > 16:
        return set()
    if id(schema) not in known:
        known[id(schema)] = set()
        known[id(schema)] = _types_of(schema, root, depth + 1, known)
    return known[id(schema)]


def _types_of(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int, known: dict[int, set[str]]) -> set[str]:
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(referred(reference, root), root, depth, known)
    if isinstance(named := schema.get("type"), str | list):
        return {named} if isinstance(named, str) else {kind for kind in named if isinstance(kind, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {kind_of(value) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            each = [types_of(part, root, depth, known) for part in parts]
            if key == "allOf":
                each = [kinds for kinds in each if kinds][:1]
            return set().union(*each) if all(each) else set()
    return set()


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema, such as `#/$defs/NAME`, refers to; None if nothing."""
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#") else ("",):
        if part:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, Mapping) else None
    return target if reference.startswith("#") else None


def chain(root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schema of all arguments and those that it refers to, one after another: the last one has the properties. It
    still has a `$ref` if that leads nowhere."""
    found = [root]
    while isinstance(reference := found[-1].get("$ref"), str) and len(found) < 16:
        target = referred(reference, root)
        if not isinstance(target, Mapping):
            break
        found.append(target)
    return found


def kind_of(value: Any) -> str:
    """The type of a value, as schemas name it."""
    return "string" if isinstance(value, str) else next((kind for kind in ORDER if _is_of(value, kind)), "array")
