"""JSON schemas of Python functions, which describe tools to a model, and checks of arguments against them."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.errors import UserError, closest

SCALARS: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
CONTAINERS: dict[Any, str] = {list: "array", tuple: "array", dict: "object"}
PYTHON: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE)
ARGUMENT = re.compile(r"^[ \t]*(\w+)(?:[ \t]*\([^)\n]*\))?:[ \t]*(.*)$")


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The function's schema in OpenAI's tool format, as chat templates show it.

    It has the function's name, its docstring up to the first section, and its annotated parameters with their
    descriptions from the `Args:` section (Google style). A `schema` attribute, a dict, is used as it is. Raises
    UserError for a function without a docstring, or with a parameter that has no annotation, has a type without a JSON
    equivalent, or cannot be passed by name.
    """
    schema = getattr(function, "schema", None)
    if isinstance(schema, dict):
        return schema
    name = tool_name(function)
    where = f"the tool {name} ({_location(function)})"
    text = inspect.getdoc(function) or ""
    section = SECTION.search(text)
    description = text[: section.start()].strip() if section else text.strip()
    if not description:
        raise UserError(f"{where} has no docstring; add one that tells the model what it does")
    try:
        # Only parameters matter: the return type can be any class.
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"{where} cannot be described ({error}); make it a function with annotations") from error
    described = _descriptions(text)
    properties: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"{where} has the parameter {parameter}, which cannot be passed by name; name each one")
        if parameter.name not in hints:
            raise UserError(f"{where}: the parameter {parameter.name} has no annotation; give it one, such as `: str`")
        kind = _schema_of_type(hints[parameter.name])
        if kind is None:
            raise UserError(
                f"{where}: the parameter {parameter.name} is a {hints[parameter.name]}, which JSON cannot express; "
                "use str, int, float, bool, None, Literal, Enum, list, dict, tuple and unions of them"
            )
        words = described.get(parameter.name)
        properties[parameter.name] = kind | ({"description": words} if words else {})
    required = [p.name for p in parameters.values() if p.default is p.empty]
    arguments: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        arguments["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": arguments}}


def _location(function: Callable[..., Any]) -> str:
    """`file:line`; the module of a function written in C."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else str(getattr(function, "__module__", "?"))


def tool_name(function: Callable[..., Any]) -> str:
    """The name by which a model calls a tool."""
    schema = getattr(function, "schema", None)
    if isinstance(schema, dict):
        return str(schema["function"]["name"])
    return str(getattr(function, "__name__", type(function).__name__))


def problem_with(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What is wrong with a call's arguments, as a message for the model; empty if they are valid.

    `schema`: of the parameters, as in the result of `schema_of`.
    """
    known = schema.get("properties", {})
    for name in arguments:
        if name not in known:
            names = f"it takes {', '.join(known)}" if known else "it takes none"
            return f'there is no argument "{name}"; {names}.{closest(name, known)}'
    if missing := [name for name in schema.get("required", ()) if name not in arguments]:
        return f'the argument "{missing[0]}" is missing'
    for name, value in arguments.items():
        if not _fits(value, known[name]):
            return f'the argument "{name}" must be {_expected(known[name])}'
    return ""


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        # 1 == True == 1.0 in Python, but not in JSON.
        return any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in schema["enum"])
    types = schema.get("type", ())
    kinds = [types] if isinstance(types, str) else types
    if kinds and not any(_is(value, kind) for kind in kinds):
        return False
    if isinstance(value, list):
        items = schema.get("prefixItems")
        if items is not None:
            return len(value) == len(items) and all(map(_fits, value, items))
        return all(_fits(item, schema.get("items", {})) for item in value)
    if isinstance(value, dict):
        return all(_fits(item, schema.get("additionalProperties", {})) for item in value.values())
    return True


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, PYTHON.get(kind, object)) and (not isinstance(value, bool) or kind == "boolean")


def _expected(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        text = " or ".join(_expected(one) for one in schema["anyOf"])
    elif "enum" in schema:
        text = "one of " + ", ".join(map(repr, schema["enum"]))
    else:
        kinds = schema.get("type", "anything")
        text = "of the type " + (kinds if isinstance(kinds, str) else " or ".join(kinds))
        if "items" in schema:
            text += f", each {_expected(schema['items'])}"
        if "prefixItems" in schema:
            text += f" of {len(schema['prefixItems'])}: " + ", ".join(map(_expected, schema["prefixItems"]))
    return text + (" or null" if schema.get("nullable") else "")


def _schema_of_type(hint: Any) -> dict[str, Any] | None:
    """The schema of a type hint; None if JSON cannot express it."""
    if hint is Any:
        return {}
    if hint in SCALARS or hint in CONTAINERS:
        return {"type": SCALARS.get(hint) or CONTAINERS[hint]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        # The function receives a plain value, not the Enum, which only works if the Enum is also a str or int.
        return _one_of([member.value for member in hint]) if issubclass(hint, str | int) else None
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _one_of(list(args))
    if origin in (Union, types.UnionType):
        return _union(args)
    parts = [_schema_of_type(arg) for arg in args if arg is not ...]
    if any(part is None for part in parts) or (... in args):
        return None
    if origin is list:
        return {"type": "array", "items": parts[0]}
    if origin is tuple:
        return {"type": "array", "prefixItems": parts}
    if origin is dict and args[0] is str:
        return {"type": "object", "additionalProperties": parts[1]}
    return None


def _one_of(values: list[Any]) -> dict[str, Any] | None:
    if not values or any(type(value) not in SCALARS for value in values):
        return None
    kinds = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union(args: tuple[Any, ...]) -> dict[str, Any] | None:
    parts = [_schema_of_type(arg) for arg in args if arg is not type(None)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if len(known) == 1:
        schema = dict(known[0])
    elif all(part.keys() == {"type"} for part in known):
        names = sorted({part["type"] for part in known})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": known}
    return schema | ({"nullable": True} if type(None) in args else {})


def _descriptions(text: str) -> dict[str, str]:
    """The `Args:` section by parameter; lines that are indented further continue the one above."""
    begin = re.search(r"^(?:Args|Arguments|Parameters):[ \t]*\n", text, re.MULTILINE)
    if begin is None:
        return {}
    end = SECTION.search(text, begin.end())
    lines = [line for line in text[begin.end() : end.start() if end else None].splitlines() if line.strip()]
    descriptions: dict[str, str] = {}
    depth, name = None, ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        depth = indent if depth is None else depth
        match = ARGUMENT.match(line)
        if indent < depth or (indent == 0):
            break
        if match and indent == depth:
            name = match.group(1)
            descriptions[name] = match.group(2).strip()
        elif name:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions
