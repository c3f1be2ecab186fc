"""How an argument may be written in a call whose strings have no quotes: as a literal, as JSON or as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.replies.tagged_calls import ORDER, argument_types, kind_of, read_value, referred
from lockstep.errors import UserError
from lockstep.generate.server.schema_check import is_annotation

Parts = Sequence[Mapping[str, Any]]
"""Schemas that a value must all fit, without keywords that combine others."""

COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "$defs", "definitions")
LENGTHS = ("minLength", "maxLength")
OF_CHOICES = {"type", "enum", "const", *LENGTHS}
OF_TEXT = {"type", "pattern", "format", *LENGTHS}
MOST = 512
"""Schemas that an argument's combines, and alternatives that they have together."""
DEEPEST = 32
TAGS = ("</parameter>", "</arg_value>")

_DAY = "(0[1-9]|[12][0-9])"
_DATE = f"[0-9]{{4}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-30|(0[13578]|1[02])-31)"
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR}:[0-5][0-9])"
_BYTE = "(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
}
"""Patterns of texts that have a format; not of all of them (no leap seconds, no capital letters in UUIDs)."""

ASCII = {"d": "[0-9]", "w": "[0-9A-Za-z_]"}
"""Classes that have characters of other scripts in Rust's patterns, but not in JSON Schema's."""


@dataclass(frozen=True)
class Forms:
    """What may be written for an argument: any of these."""

    literals: Sequence[str] = ()
    schemas: Sequence[Mapping[str, Any]] = ()
    """Of values written as JSON."""
    texts: Sequence[Sequence[str]] = ()
    """Of strings: the patterns that each match the whole text; none: any text."""


def argument_forms(root: Mapping[str, Any], key: str, schema: Any) -> Forms:
    """Of the argument `key`, which has the schema, among the arguments that have the schema `root`.

    Raises UserError, with the keyword's name, for what would not be enforced, and if a reader could take what fits the
    schema for something that does not.
    """
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    types = argument_types(root, key)
    if types and "string" not in types:
        return Forms(schemas=[{**schema, **definitions}])
    choices, schemas, texts = list[Any](), list[Mapping[str, Any]](), list[list[str]]()
    free = set[str]()  # kinds other than strings of which every value fits
    for parts in _Combined(root).alternatives(schema):
        kinds, values = _kinds(parts), _values(parts)
        if values is not None:
            _refuse_others(parts, OF_CHOICES)
            choices += [value for value in values if kind_of(value) in kinds and _has_length(value, parts)]
            continue
        others = kinds - {"string"}
        if "string" in kinds:
            _refuse_others(parts, OF_TEXT)
            texts.append([*_lengths(parts), *_patterns(parts)])
        if all(part.keys() <= OF_TEXT for part in parts):
            free |= others
        if others:
            schemas.append({"type": sorted(others), "allOf": list(parts), **definitions})
    if texts:
        free |= {"null"} & {kind_of(value) for value in choices}
        if confused := sorted((types or set(ORDER)) - {"string"} - free):
            raise UserError(f"its text could be read as a value of the type {confused[0]} that does not fit")
    if [] in texts:
        return Forms(texts=[[]])
    if not choices and not schemas and not texts:
        raise UserError("no value fits its schema")
    return Forms([_literal(value, types) for value in choices], schemas, texts)


class _Combined:
    """Takes schemas within `root` apart."""

    def __init__(self, root: Mapping[str, Any]):
        self.root, self.left = root, MOST

    def alternatives(self, schema: Any, depth: int = 0) -> list[Parts]:
        """A value fits the schema if it fits all parts of one of these."""
        self.left -= 1
        if self.left < 0 or depth > DEEPEST:
            raise UserError(f"it combines more than {MOST} schemas, or itself")
        if isinstance(schema, bool):
            return [[]] if schema else []
        if not isinstance(schema, Mapping):
            raise UserError(f"a schema must be an object or a boolean, not {schema!r:.60}")
        own = {key: value for key, value in schema.items() if key not in COMBINED and _restricts(key, value)}
        found: list[Parts] = [[own]]
        if "$ref" in schema:
            found = _both(found, self.alternatives(self._target(schema["$ref"]), depth + 1))
        for part in _list(schema, "allOf"):
            found = _both(found, self.alternatives(part, depth + 1))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                each = [self.alternatives(part, depth + 1) for part in _list(schema, key)]
                if key == "oneOf":
                    _refuse_overlap(each)
                found = _both(found, [parts for alternatives in each for parts in alternatives])
        return found

    def _target(self, reference: Any) -> Any:
        target = referred(reference, self.root) if isinstance(reference, str) else None
        if target is None:
            raise UserError(f"the schema refers to {str(reference)[:80]!r}, which it does not have")
        return target


def _restricts(key: str, value: Any) -> bool:
    return not (is_annotation(key) or (key in ("items", "additionalProperties") and (value is True or value == {})))


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    parts = schema.get(key, [])
    if not isinstance(parts, list):
        raise UserError(f"{key} must be a list")
    return parts


def _both(some: list[Parts], others: list[Parts]) -> list[Parts]:
    if len(some) * len(others) > MOST:
        raise UserError(f"it has more than {MOST} alternatives")
    return [[*one, *other] for one in some for other in others]


def _refuse_overlap(each: Iterable[list[Parts]]) -> None:
    """Raises UserError unless a value can fit only one of the schemas, which their types or values must show."""
    seen_kinds, seen_values = set[str](), dict[str, str]()
    for alternatives in each:
        kinds, values = set[str](), dict[str, str]()
        for parts in alternatives:
            found = _values(parts)
            kinds |= _kinds(parts) if found is None else set()
            values |= {json.dumps(value, sort_keys=True): kind_of(value) for value in found or ()}
        both = kinds & seen_kinds or values.keys() & seen_values.keys()
        if both or kinds & set(seen_values.values()) or seen_kinds & set(values.values()):
            raise UserError("oneOf has alternatives that overlap; use anyOf")
        seen_kinds |= kinds
        seen_values |= values


def _kinds(parts: Parts) -> set[str]:
    """The types of the values that may fit."""
    kinds = {"string", *ORDER}
    for part in parts:
        if isinstance(named := part.get("type"), str | list):
            allowed = {named} if isinstance(named, str) else {kind for kind in named if isinstance(kind, str)}
            kinds &= allowed | ({"integer"} if "number" in allowed else set())
    return kinds


def _values(parts: Parts) -> list[Any] | None:
    """The values that may fit, whatever their types; None if they are not listed."""
    lists = [[part["const"]] for part in parts if "const" in part]
    lists += [part["enum"] for part in parts if isinstance(part.get("enum"), list)]
    if not lists:
        return None
    each = [{json.dumps(value, sort_keys=True): value for value in values} for values in lists]
    return [value for name, value in each[0].items() if all(name in others for others in each)]


def _refuse_others(parts: Parts, known: set[str]) -> None:
    for key in (key for part in parts for key in part if key not in known):
        raise UserError(f"{key[:80]} of a value that may be a string is not enforced in this model's format of calls")


def _limits(parts: Parts) -> tuple[int, int | None]:
    """The least and the most characters of a string."""
    for part in parts:
        for key in LENGTHS:
            if not isinstance(length := part.get(key, 0), int) or length < 0:
                raise UserError(f"{key} must be an integer of at least 0, not {length!r:.60}")
    most = [part["maxLength"] for part in parts if "maxLength" in part]
    return max([0, *(part.get("minLength", 0) for part in parts)]), min(most) if most else None


def _has_length(value: Any, parts: Parts) -> bool:
    least, most = _limits(parts)
    return not isinstance(value, str) or (least <= len(value) and (most is None or len(value) <= most))


def _lengths(parts: Parts) -> list[str]:
    least, most = _limits(parts)
    if most is not None and least > most:
        raise UserError(f"minLength ({least}) is greater than maxLength ({most})")
    return [f"(?s:.){{{least},{'' if most is None else most}}}"] if least or most is not None else []


def _patterns(parts: Parts) -> list[str]:
    """Of the whole text, for each `pattern` and `format`."""
    found = []
    for part in parts:
        if "pattern" in part:
            if not isinstance(part["pattern"], str):
                raise UserError("pattern must be a string")
            found.append(_searched(part["pattern"]))
        if "format" in part:
            if not isinstance(part["format"], str) or part["format"] not in FORMATS:
                raise UserError(f"format {part['format']!r:.60} is not enforced in this model's format of calls")
            found.append(FORMATS[part["format"]])
    return found


def _searched(pattern: str) -> str:
    """The pattern of texts in which another occurs. Anchors may begin and end its alternatives."""
    found = []
    for each in _split(pattern):
        begins, ends = each.startswith("^"), each.endswith("$") and (len(each) - len(each[:-1].rstrip("\\"))) % 2 == 1
        inner = re.sub(r"\\(.)", lambda escape: ASCII.get(escape[1], escape[0]), each[begins : len(each) - ends])
        found.append(f"{'' if begins else '(?s:.*)'}{inner}{'' if ends else '(?s:.*)'}")
    return f"({'|'.join(found)})"


def _split(pattern: str) -> list[str]:
    """At each `|` that is not within a group or a class. Raises UserError for what Rust's classes have and
    JavaScript's do not."""
    found, depth, class_begin, escaped = [""], 0, -1, False
    for place, character in enumerate(pattern):
        if escaped or character == "\\":
            escaped = not escaped
        elif class_begin >= 0:
            if character == "[" or (character == "]" and pattern[class_begin:place] in ("[", "[^")):
                raise UserError(f"escape the brackets within the classes of the pattern {pattern!r:.80}")
            class_begin = -1 if character == "]" else class_begin
        elif character == "[":
            class_begin = place
        elif character == "|" and depth == 0:
            found.append("")
            continue
        else:
            depth += {"(": 1, ")": -1}.get(character, 0)
        found[-1] += character
    return found


def _literal(value: Any, types: set[str]) -> str:
    """A value as it is written. Raises UserError if it would be read as another."""
    text = value if isinstance(value, str) else json.dumps(value)
    read = read_value(text, types)
    if json.dumps(read) != json.dumps(value) or any(tag in text for tag in TAGS):
        raise UserError(f"the value {json.dumps(value)[:80]} would be read as another")
    return text
