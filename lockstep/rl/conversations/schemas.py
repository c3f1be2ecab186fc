"""What a model is told of a tool: JSON schemas of Python functions, and arguments checked against them."""

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
    """The function as OpenAI describes tools, and as chat templates show them.

    Its name, its docstring up to the first section, and its parameters by their annotations; what stands below `Args:`
    (Google's style) describes them. A `schema` attribute of the function, a dict, is taken as it is. Raises UserError
    for a function that a model cannot be told of: without a docstring, or with a parameter that has no annotation, one
    that JSON knows nothing of, or that cannot be given by name.
    """
    given = getattr(function, "schema", None)
    if isinstance(given, dict):
        return given
    name = tool_name(function)
    where = f"the tool {name} ({_place(function)})"
    text = inspect.getdoc(function) or ""
    section = SECTION.search(text)
    description = text[: section.start()].strip() if section else text.strip()
    if not description:
        raise UserError(f"{where} has no docstring; describe in one what it does, for the model")
    try:
        # Of a parameter alone: a class or an object of the user's own may well be what comes back.
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"{where} cannot be described ({error}); make it a function with annotations") from error
    described = _descriptions(text)
    properties: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"{where} has the parameter {parameter}, which cannot be given by name; name each one")
        if parameter.name not in hints:
            raise UserError(f"{where}: the parameter {parameter.name} has no annotation; give it one, such as `: str`")
        kind = _schema_of_type(hints[parameter.name])
        if kind is None:
            raise UserError(
                f"{where}: the parameter {parameter.name} is a {hints[parameter.name]}, which has no JSON type; "
                "use str, int, float, bool, None, Literal, Enum, list, dict, tuple and unions of them"
            )
        about = described.get(parameter.name)
        properties[parameter.name] = kind | ({"description": about} if about else {})
    required = [p.name for p in parameters.values() if p.default is p.empty]
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _place(function: Callable[..., Any]) -> str:
    """`file:line`; the module where there is none, as of what is written in C."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else str(getattr(function, "__module__", "?"))


def tool_name(function: Callable[..., Any]) -> str:
    """The name that a model calls a tool by."""
    given = getattr(function, "schema", None)
    if isinstance(given, dict):
        return str(given["function"]["name"])
    return str(getattr(function, "__name__", type(function).__name__))


def problem_with(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call, for the model; empty where nothing is.

    `schema` is that of the parameters, of the kinds that `schema_of` makes.
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
            return f'the argument "{name}" must be {_wanted(known[name])}'
    return ""


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        # 1 == True == 1.0 in Python, but not in JSON.
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in schema["enum"])
    wanted = schema.get("type", ())
    kinds = [wanted] if isinstance(wanted, str) else wanted
    if kinds and not any(_is(value, kind) for kind in kinds):
        return False
    if isinstance(value, list):
        places = schema.get("prefixItems")
        if places is not None:
            return len(value) == len(places) and all(map(_fits, value, places))
        return all(_fits(one, schema.get("items", {})) for one in value)
    if isinstance(value, dict):
        return all(_fits(one, schema.get("additionalProperties", {})) for one in value.values())
    return True


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, PYTHON.get(kind, object)) and (not isinstance(value, bool) or kind == "boolean")


def _wanted(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        said = " or ".join(_wanted(one) for one in schema["anyOf"])
    elif "enum" in schema:
        said = "one of " + ", ".join(map(repr, schema["enum"]))
    else:
        kinds = schema.get("type", "anything")
        said = "of the type " + (kinds if isinstance(kinds, str) else " or ".join(kinds))
        if "items" in schema:
            said += f", each {_wanted(schema['items'])}"
        if "prefixItems" in schema:
            said += f" of {len(schema['prefixItems'])}: " + ", ".join(map(_wanted, schema["prefixItems"]))
    return said + (" or null" if schema.get("nullable") else "")


def _schema_of_type(hint: Any) -> dict[str, Any] | None:
    """None where JSON has nothing of the kind."""
    if hint is Any:
        return {}
    if hint in SCALARS or hint in CONTAINERS:
        return {"type": SCALARS.get(hint) or CONTAINERS[hint]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        # A parameter of an Enum would be given a plain value, which is a surprise unless it is both.
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
    """What stands below `Args:`, by parameter; lines that are indented further belong to the one above."""
    begin = re.search(r"^(?:Args|Arguments|Parameters):[ \t]*\n", text, re.MULTILINE)
    if begin is None:
        return {}
    end = SECTION.search(text, begin.end())
    lines = [line for line in text[begin.end() : end.start() if end else None].splitlines() if line.strip()]
    found: dict[str, str] = {}
    depth, name = None, ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        depth = indent if depth is None else depth
        match = ARGUMENT.match(line)
        if indent < depth or (indent == 0):
            break
        if match and indent == depth:
            name = match.group(1)
            found[name] = match.group(2).strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
