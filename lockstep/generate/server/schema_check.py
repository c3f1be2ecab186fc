"""Keywords of JSON schemas that the grammar's compiler would pass over in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
