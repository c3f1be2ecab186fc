"""Grading completions, and refusing rewards that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from lockstep.errors import UserError
from lockstep.rl.environment import Environment, Example, user_line


@dataclass(frozen=True)
class Grade:
    """A completion's rewards by name, and the total that is trained on."""

    total: float
    by_name: dict[str, float]


def grade(environment: Environment, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
    """Rewards of each completion of the example beside it.

    A single number goes by the name `reward`. Raises UserError, naming the example, for a reward that is NaN,
    infinite or no number, for names that vary between examples, and for an error in the environment's own code.
    """
    grades: list[Grade] = []
    for example, completion in zip(examples, completions, strict=True):
        try:
            value = environment.reward(example, completion)
        except Exception as error:
            raise UserError(
                f"{user_line(error)}: {type(environment).__name__}.reward failed on example {example.name} "
                f"({type(error).__name__}: {error})"
            ) from error
        by_name = _checked(value, environment, example)
        if grades and by_name.keys() != grades[0].by_name.keys():
            raise UserError(
                f"{type(environment).__name__}.reward names {', '.join(by_name)} for example {example.name}, but "
                f"{', '.join(grades[0].by_name)} for another; give every example the same names"
            )
        weights = environment.reward_weights
        grades.append(Grade(sum(weights.get(n, 1.0) * v for n, v in by_name.items()), by_name))
    return grades


def _checked(value: Any, environment: Environment, example: Example) -> dict[str, float]:
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not rewards:
        raise UserError(f"{type(environment).__name__}.reward returned no reward for example {example.name}")
    for name, number in rewards.items():
        if not isinstance(number, Real) or not math.isfinite(number):
            raise UserError(
                f"{type(environment).__name__}.reward returned {number!r} as {name!r} for example {example.name}; "
                "return a finite number, or a dict of them"
            )
    return {str(name): float(number) for name, number in rewards.items()}
