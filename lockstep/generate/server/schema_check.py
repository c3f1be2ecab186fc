"""What the compiler of grammars does not find in a JSON schema: unknown keywords, and values without an end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.data.replies.tagged_calls import referred

ANNOTATIONS = frozenset(
    (
        *("$anchor", "$comment", "$id", "$schema", "title", "description", "default", "deprecated", "example"),
        *("examples", "readOnly", "writeOnly", "nullable", "discriminator", "externalDocs", "xml", "enumNames"),
    )
)
"""Those that restrict no value. OpenAPI's `nullable` would allow more: without it null is not allowed."""
SCHEMAS = frozenset(("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames"))
"""Keywords whose value is a schema."""
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
MAPS = frozenset(("$defs", "definitions", "properties", "patternProperties", "dependentSchemas"))
KNOWN = (
    ANNOTATIONS
    | SCHEMAS
    | LISTS
    | MAPS
    | frozenset(
        (
            *("$ref", "additionalItems", "const", "dependencies", "dependentRequired", "enum", "exclusiveMaximum"),
            *("exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum"),
            *("minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "required"),
            *("type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
        )
    )
)
"""All others restrict: llguidance enforces them, or refuses them by name."""


def unknown_keyword(schema: Any) -> str:
    """The path of the first keyword that is not one of JSON Schema's, such as `properties.a.minlength`; empty if there
    is none. `x-` and its like are free."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        for key, value in part.items():
            where = f"{path}{key}"
            if key in SCHEMAS:
                waiting.append((f"{where}.", value))
            elif key in LISTS and isinstance(value, list):
                waiting += [(f"{where}.{number}.", one) for number, one in enumerate(value)]
            elif key in MAPS and isinstance(value, Mapping):
                waiting += [(f"{where}.{name}.", one) for name, one in value.items()]
            elif key not in KNOWN and not key.startswith("x-"):
                return where
    return ""


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


def _ends(schema: Any, finite: set[str]) -> bool:
    """Whether some value fits that ends, if those of the `finite` references do."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return True
    if isinstance(name := schema.get("$ref"), str) and name not in finite:
        return False
    for key, holds in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        if isinstance(parts := schema.get(key), list) and not holds(_ends(part, finite) for part in parts):
            return False
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    if not types or types - {"object", "array"}:
        return True
    properties, required = schema.get("properties"), schema.get("required")
    if "object" in types:
        needed = required if isinstance(required, list) and isinstance(properties, Mapping) else []
        if all(_ends(properties.get(key), finite) for key in needed if properties):
            return True
    return "array" in types and (not schema.get("minItems") or _ends(schema.get("items"), finite))
