"""What the compiler of grammars does not find in a JSON schema: unknown keywords, and values without an end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.data.replies.tagged_calls import referred

ANNOTATIONS = frozenset(
    (
        *("$anchor", "$comment", "$id", "$schema", "title", "description", "default", "deprecated", "example"),
        *("examples", "readOnly", "writeOnly", "nullable", "discriminator", "externalDocs", "xml", "enumNames"),
    )
)
"""Those that restrict no value. OpenAPI's `nullable` would allow more: without it null is not allowed."""
SCHEMAS = frozenset(
    (
        *("additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not"),
        *("oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    )
)
"""Keywords whose value is a schema, or a list of them."""
MAPS = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"))
KEYED = ("properties", "patternProperties")
KNOWN = (
    ANNOTATIONS
    | SCHEMAS
    | MAPS
    | frozenset(
        (
            *("$ref", "const", "dependentRequired", "enum", "exclusiveMaximum", "exclusiveMinimum", "format"),
            *("maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems"),
            *("minLength", "minProperties", "minimum", "multipleOf", "pattern", "required", "type", "uniqueItems"),
        )
    )
)
"""All others restrict: llguidance enforces them, or refuses them by name."""


def is_annotation(key: str) -> bool:
    """Whether a keyword restricts no value. `x-` and its like are free."""
    return key in ANNOTATIONS or key.startswith("x-")


def unknown_keyword(schema: Any) -> str:
    """The path of the first keyword that is not one of JSON Schema's, such as `properties.a.minlength`; empty if there
    is none."""
    parts = _subschemas(schema)
    return next(
        (f"{path}{key}" for path, part in parts for key in part if key not in KNOWN and not is_annotation(key)), ""
    )


def miscounted_keys(schema: Any) -> str:
    """The path of the first `minProperties` that a key written twice could satisfy; empty if there is none. A key that
    is not among the properties may be, so only one beside the required ones is certain."""
    for path, part in _subschemas(schema):
        least, certain = part.get("minProperties"), len(_names(part.get("required")))
        is_open = part.get("additionalProperties", True) is not False or part.get("patternProperties")
        if isinstance(least, int) and least > certain + 1 and is_open:
            return f"{path}minProperties"
    return ""


CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
CONTROL_IN_PATTERN = re.compile(
    CONTROL.pattern + r"|\\(?:[aev0]|c[A-Za-z]|(?:x|u00)(?:0[0-7bBe-fE-F]|1[0-9a-fA-F]|7[fF]))"
)
CLASS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)


def control_characters(schema: Any) -> str:
    """The path of the first keyword that asks for characters that are not written in JSON; empty if there is none."""
    for path, part in _subschemas(schema):
        if isinstance(pattern := part.get("pattern"), str):
            # Of a class, the other characters are written.
            outside = CLASS.sub(lambda match: "" if match[0][0] == "[" or match[0] == r"\\" else match[0], pattern)
            if CONTROL_IN_PATTERN.search(outside):
                return f"{path}pattern"
        for key in ("const", "enum"):
            if any(map(CONTROL.search, _texts(part.get(key)))):
                return f"{path}{key}"
    return ""


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list | Mapping):
            waiting += one.values() if isinstance(one, Mapping) else one


def patterns(schema: Any) -> Iterator[str]:
    """All regular expressions of a schema."""
    for _, part in _subschemas(schema):
        if isinstance(pattern := part.get("pattern"), str):
            yield pattern
        if isinstance(named := part.get("patternProperties"), Mapping):
            yield from named


def _subschemas(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A schema and those within it, each with the beginning of its keywords' paths."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        yield path, part
        for key, value in part.items():
            if key in SCHEMAS and not isinstance(value, list):
                waiting.append((f"{path}{key}.", value))
            elif key in SCHEMAS:
                waiting += [(f"{path}{key}.{number}.", one) for number, one in enumerate(value)]
            elif key in MAPS and isinstance(value, Mapping):
                waiting += [(f"{path}{key}.{name}.", one) for name, one in value.items()]


MOST_ROUNDS, MOST_REFERENCES = 64, 1024
"""Schemas with more are not looked into further."""


def is_endless(schema: Mapping[str, Any]) -> bool:
    """Whether every value that fits the schema would contain another one without end, as of an object that requires
    one of its own kind."""
    references = _references(schema)
    if len(references) > MOST_REFERENCES:
        return False
    finite: set[str] = set()
    for _ in range(MOST_ROUNDS):
        new = {name for name in references - finite if _ends(referred(name, schema), finite)}
        if not new:
            return not _ends(schema, finite)
        finite |= new
    return False


def _references(schema: Any) -> set[str]:
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if isinstance(name := part.get("$ref"), str):
                found.add(name)
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return found


def _ends(schema: Any, finite: set[str], outer: frozenset[str] = frozenset()) -> bool:
    """Whether some value fits that ends, if those of the `finite` references do. outer: the types that a schema with
    this one among its parts allows; empty: all."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return True
    if isinstance(name := schema.get("$ref"), str) and name not in finite:
        return False
    named = schema.get("type", outer)
    types = frozenset([named] if isinstance(named, str) else _names(named))
    for key, holds in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(key)
        if isinstance(parts, list) and parts and not holds(_ends(part, finite, types) for part in parts):
            return False
    if not types or types - {"object", "array"}:
        return True
    return ("object" in types and _object_ends(schema, finite)) or ("array" in types and _array_ends(schema, finite))


def _names(values: Any) -> set[str]:
    return {one for one in values if isinstance(one, str)} if isinstance(values, list | frozenset) else set()


def _object_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    properties, by_pattern = (named if isinstance(named := schema.get(key), Mapping) else {} for key in KEYED)
    required = _names(schema.get("required"))
    # Of keys that are no properties: any of these, as matching patterns from a request may take forever.
    others = [one for one in (schema.get("additionalProperties", True), *by_pattern.values()) if one is not False]
    more = not others or any(_ends(one, finite) for one in others)
    if not all(_ends(properties[key], finite) if key in properties else more for key in required):
        return False
    least = schema.get("minProperties", 0)
    missing = least - len(required) if isinstance(least, int) else 0
    if missing <= 0 or (others and more):
        return True
    optional = [key for key in properties if key not in required and properties[key] is not False]
    # With too few keys no value fits, which the compiler says.
    too_few = not others and len(optional) < missing
    return too_few or sum(_ends(properties[key], finite) for key in optional) >= missing


def _array_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    least = schema.get("minItems", 0)
    if not isinstance(least, int) or least <= 0:
        return True
    items, first = schema.get("items", True), schema.get("prefixItems", [])
    if isinstance(items, list):  # until draft 2019-09
        items, first = schema.get("additionalItems", True), items
    first = first[:least] if isinstance(first, list) else []
    return all(_ends(one, finite) for one in first) and (least <= len(first) or _ends(items, finite))
