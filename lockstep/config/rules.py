"""`train.rules`, which override optimizer settings of parameters by name."""

from __future__ import annotations

from typing import Any

from lockstep.errors import UserError, closest


def parse_rule(rule: str) -> tuple[str, dict[str, Any]]:
    """`PATTERN key=value …` as the pattern and the settings that it changes. Raises UserError, quoting the rule."""
    pattern, *changes = rule.split() or [""]
    if not changes:
        raise UserError(f'train.rules "{rule}": give PATTERN key=value …, such as "*norm.weight learning_rate=0.5"')
    values: dict[str, Any] = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in _READERS:
            raise UserError(f'train.rules "{rule}": unknown key "{key}".{closest(key, _READERS)}')
        try:
            values[key] = _READERS[key](value)
        except (KeyError, ValueError):
            raise UserError(f'train.rules "{rule}": {key} cannot be "{value}"; {_EXPECTED[key]}') from None
    return pattern, values


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


_READERS = {
    "optimizer": {"adamw": "adamw", "muon": "muon"}.__getitem__,
    "learning_rate": _not_negative,
    "weight_decay": _not_negative,
    "frozen": {"true": True, "false": False}.__getitem__,
}
_EXPECTED = {
    "optimizer": "give adamw or muon",
    "learning_rate": "give a factor for the schedule's learning rate, 0 or more",
    "weight_decay": "give a number of 0 or more",
    "frozen": "give true or false",
}
