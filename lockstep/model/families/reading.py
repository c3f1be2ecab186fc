"""Validated access to the values of a `config.json`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lockstep.errors import UserError

SMALLEST, LARGEST = 1e-30, 1e30
"""Range of a number in a configuration, so that float32 can represent it and the results computed from it."""


def number(value: Any, where: str) -> Any:
    """Returns `value` unchanged. Raises UserError unless it is a finite number above 0."""
    # An integer can also exceed every float; the model computes with float32.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST:
        return value
    raise UserError(f"{where} is {value!r:.100}; it must be a number above 0 that fits in float32")


def whole_number(values: dict[str, Any], key: str, where: str, least: int = 0) -> int:
    """The value of `key`. Raises UserError if it is missing, null, not a whole number or below `least`."""
    value = values.get(key)
    if value is None:
        raise UserError(f"{where}: key {key} is missing; this is not a complete model configuration")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        bound = f" of at least {least}" if least else ""
        raise UserError(f"{where}: {key} is {value!r:.100}; it must be a whole number{bound}")
    return value


def truth(values: dict[str, Any], key: str, where: str) -> bool:
    """The value of `key`. Raises UserError if it is neither true nor false."""
    value = values.get(key)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key} is {value!r:.100}; it must be true or false")
    return value


def layer_numbers(values: dict[str, Any], key: str, where: str, count: int) -> tuple[int, ...]:
    """A sorted list of layers. Raises UserError if one is not below `count`."""
    value = values.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < count for n in value):
        raise UserError(f"{where}: {key} is {value!r:.100}; it must be a list of layers from 0 to {count - 1}")
    return tuple(sorted(set(value)))


def layer_kinds(values: dict[str, Any], kinds: Collection[str], where: str, count: int) -> list[str] | None:
    """`layer_types`; None if missing. Raises UserError unless it has one of `kinds` for each of `count` layers."""
    value = values.get("layer_types")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != count or any(kind not in kinds for kind in map(str, value)):
        raise UserError(
            f"{where}: layer_types is {value!r:.100}; it must name one of {', '.join(kinds)} for each layer"
        )
    return value
