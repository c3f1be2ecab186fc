"""Bounds of a setting, written as an annotation: `steps: Annotated[int, AtLeast(0)]`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from lockstep.errors import closest


@dataclasses.dataclass(frozen=True)
class AtLeast:
    limit: float

    def problem(self, value: float) -> str:
        return "" if value >= self.limit else f"{self.limit} or more"


@dataclasses.dataclass(frozen=True)
class Above:
    limit: float

    def problem(self, value: float) -> str:
        return "" if value > self.limit else f"above {self.limit}"


@dataclasses.dataclass(frozen=True)
class AtMost:
    limit: float

    def problem(self, value: float) -> str:
        return "" if value <= self.limit else f"{self.limit} or less"


@dataclasses.dataclass(frozen=True)
class Below:
    limit: float

    def problem(self, value: float) -> str:
        return "" if value < self.limit else f"below {self.limit}"


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of the choices, or a function in a file of the user's, FILE.py:NAME."""

    choices: tuple[str, ...]

    def problem(self, value: str) -> str:
        if value in self.choices or function_in_file(value):
            return ""
        hint = closest(value, self.choices)
        return f"{', '.join(filter(None, self.choices))}, or FILE.py:NAME, a function of your own.{hint}"


def function_in_file(value: str) -> tuple[str, str] | None:
    """File and function of a setting such as `my_loss.py:loss`; None if it is something else."""
    file, _, name = value.rpartition(":")
    return (file, name) if file.endswith(".py") and name.isidentifier() else None


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def bound_problems(config: Any, prefix: str = "") -> Iterator[str]:
    """A message for each field of a config dataclass, including nested ones, that does not fit its annotation.

    A value must have its type, be finite and within its bounds, and be one of the choices if there are any.
    """
    hints = get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, name, hint = getattr(config, field.name), prefix + field.name, hints[field.name]
        kind, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if type(None) in (kinds := get_args(kind)):
            if value is None:
                continue
            kind = kinds[0]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and not isinstance(value, kind):
            yield f"{name} is {value!r:.60}; give a {kind.__name__}"
        elif dataclasses.is_dataclass(value):
            yield from bound_problems(value, f"{name}.")
        elif get_origin(kind) is Literal:
            choices = get_args(kind)
            if value not in choices:
                *others, last = [str(choice) or '""' for choice in choices]
                yield f'{name} is "{value}"; give {", ".join(others)} or {last}'
        elif wrong_type := type_problem(name, value, kind):
            yield wrong_type
        elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            yield f"{name} is {value!r:.60}, which is not valid UTF-8; correct it"
        elif isinstance(value, str) and "\0" in value:
            yield f"{name} is {value!r:.60}, which contains a NUL; remove it"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{name} is {value}; it must be finite"
        else:
            wrong = (bound.problem(value) for bound in bounds if not isinstance(bound, str))
            yield from (f"{name} is {value}; it must be {problem}" for problem in wrong if problem)


def type_problem(name: str, value: Any, kind: Any) -> str:
    """A message if a value does not have its type; else empty."""
    if _is(value, kind):
        return ""
    if get_origin(kind) is tuple:
        return f"{name} is {value!r:.60}; it must be a list, each item {_NAMES[get_args(kind)[0]]}"
    return f"{name} is {value!r:.60}; it must be {_NAMES[kind]}"


def _is(value: Any, kind: Any) -> bool:
    if kind in _NAMES:
        return kind is bool if isinstance(value, bool) else isinstance(value, (int, float) if kind is float else kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is(each, get_args(kind)[0]) for each in value)
    return True
