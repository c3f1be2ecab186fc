"""Values of a `config.json`, checked."""

from __future__ import annotations

from typing import Any

from lockstep.errors import UserError


def whole_number(values: dict[str, Any], key: str, where: str, *others: str, default: int | None = None) -> int:
    """The value of `key`, or of one of its `others` names. Raises UserError if it is missing or not a whole number."""
    found = next((values[name] for name in (key, *others) if values.get(name) is not None), default)
    if found is None:
        raise UserError(f"{where}: key {key} is missing; this is not a complete model configuration")
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise UserError(f"{where}: {key} is {found!r:.100}; it must be a whole number")
    return found


def truth(values: dict[str, Any], key: str, where: str, default: bool) -> bool:
    """The value of `key`. Raises UserError if it is neither true nor false."""
    found = values.get(key, default)
    if not isinstance(found, bool):
        raise UserError(f"{where}: {key} is {found!r:.100}; it must be true or false")
    return found


def layer_numbers(values: dict[str, Any], key: str, where: str, count: int) -> tuple[int, ...]:
    """A list of layers, in order. Raises UserError if it names one beyond `count`."""
    found = values.get(key)
    found = [] if found is None else found
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n < count for n in found):
        raise UserError(f"{where}: {key} is {found!r:.100}; it must be a list of layers from 0 to {count - 1}")
    return tuple(sorted(set(found)))
