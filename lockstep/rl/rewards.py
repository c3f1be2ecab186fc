"""Grading completions, and refusing rewards that are no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from lockstep.errors import UserError, closest
from lockstep.rl.environment import Environment, Example, source_file, user_line

LARGEST = 1e18
"""Rewards are trained on in float32, where the square of a larger one, or of a difference, would be infinite."""


@dataclass(frozen=True)
class Grade:
    """A completion's rewards by name, and the total that is trained on."""

    total: float
    by_name: dict[str, float]


def grade(environment: Environment, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
    """Rewards of each completion of the example beside it.

    A single number goes by the name `reward`; True and False are 1 and 0. Raises UserError, naming the example, for a
    reward that is NaN, above `LARGEST` or no number, for names that vary between examples, and for an error in
    the environment's own code.
    """
    grades: list[Grade] = []
    for example, completion in zip(examples, completions, strict=True):
        try:
            value = environment.reward(example, completion)
        except Exception as error:
            where = user_line(error, source_file(type(environment)))
            raise UserError(
                f"{where}: {type(environment).__name__}.reward failed on example {example.name} "
                f"({type(error).__name__}: {error})"
            ) from error
        by_name = _checked(value, environment, example)
        if grades and by_name.keys() != grades[0].by_name.keys():
            raise UserError(
                f"{type(environment).__name__}.reward names {', '.join(by_name)} for example {example.name}, but "
                f"{', '.join(grades[0].by_name)} for another; give every example the same names"
            )
        weights = environment.reward_weights
        if unknown := sorted(weights.keys() - by_name.keys()):
            raise UserError(
                f"{type(environment).__name__}.reward_weights names {unknown[0]!r}, which is no reward of example "
                f"{example.name}.{closest(unknown[0], by_name)} There {'are' if len(by_name) > 1 else 'is'} "
                f"{', '.join(by_name)}"
            )
        total = sum(weights.get(n, 1.0) * v for n, v in by_name.items())
        if not abs(total) <= LARGEST:
            raise UserError(
                f"{type(environment).__name__}'s rewards add up to {total!r} for example {example.name}; make "
                "`reward_weights` and rewards finite and smaller"
            )
        grades.append(Grade(total, by_name))
    return grades


def _checked(value: Any, environment: Environment, example: Example) -> dict[str, float]:
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not rewards:
        raise UserError(f"{type(environment).__name__}.reward returned no reward for example {example.name}")
    checked: dict[str, float] = {}
    for name, value_of_name in rewards.items():
        number = _finite(value_of_name)
        if number is None:
            raise UserError(
                f"{type(environment).__name__}.reward returned {_shown(value_of_name)} as {name!r} for example "
                f"{example.name}; return a number of at most {LARGEST:g}, or a dict of them"
            )
        checked[str(name)] = number
    return checked


def _finite(value: Any) -> float | None:
    """The value as a float; None where it is no number, not finite or too large."""
    if not isinstance(value, (Real, np.bool_)):  # NumPy's bool is the one scalar of its that is no Real
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= LARGEST else None


def _shown(value: Any) -> str:
    # Python refuses to print integers of thousands of digits.
    text = f"an int of {value.bit_length()} bits" if isinstance(value, int) else repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
