"""Values of a `config.json`, checked."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lockstep.errors import UserError

SMALLEST, LARGEST = 1e-30, 1e30
"""Range of a number in a configuration: float32 can represent it, and what is computed from it."""


def number(value: Any, where: str) -> Any:
    """Returns it unchanged. Raises UserError for what is not a finite number above 0."""
    # An integer may also exceed any float; the model computes with float32.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST:
        return value
    raise UserError(f"{where} is {value!r:.100}; it must be a number above 0 that fits in float32")


def whole_number(values: dict[str, Any], key: str, where: str, least: int = 0) -> int:
    """The value of `key`. Raises UserError if it is missing, null, not a whole number or below `least`."""
    found = values.get(key)
    if found is None:
        raise UserError(f"{where}: key {key} is missing; this is not a complete model configuration")
    if not isinstance(found, int) or isinstance(found, bool) or found < least:
        bound = f" of at least {least}" if least else ""
        raise UserError(f"{where}: {key} is {found!r:.100}; it must be a whole number{bound}")
    return found


def truth(values: dict[str, Any], key: str, where: str) -> bool:
    """The value of `key`. Raises UserError if it is neither true nor false."""
    found = values.get(key)
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


def layer_kinds(values: dict[str, Any], kinds: Collection[str], where: str, count: int) -> list[str] | None:
    """`layer_types`; None if it is missing. Raises UserError unless it has one of `kinds` for each of `count`."""
    found = values.get("layer_types")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != count or any(kind not in kinds for kind in map(str, found)):
        raise UserError(
            f"{where}: layer_types is {found!r:.100}; it must name one of {', '.join(kinds)} for each layer"
        )
    return found
