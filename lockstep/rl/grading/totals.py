"""From returned rewards to the total that is trained on, and what to do about rewards that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.errors import UserError, closest
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading.calling import LARGEST, Job, Outcome, call_rewards


@dataclass(frozen=True)
class Grade:
    """A completion's rewards by name, and the total that is trained on."""

    total: float
    by_name: dict[str, float]
    failure: str = ""
    """Why there are none: `timeout`, `raised`, `memory` …; empty if there are."""


def grade(environment: Environment, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
    """Rewards of each completion of the corresponding example, in this process.

    A single number is named `reward`; True and False are 1 and 0. Raises UserError, naming the example, for a reward
    that is NaN, above `LARGEST` or not a number, for names that vary between examples, and for an error in the
    environment's own code.
    """
    jobs = list(zip(examples, completions, strict=True))
    outcomes = grade_here(environment, jobs)
    if failed := next((o for o in outcomes if o.cause), None):
        raise UserError(failed.message)
    return totals(environment, jobs, outcomes)


def grade_here(
    environment: Environment,
    jobs: Sequence[Job],
    seconds: float | None = None,
    concurrent: int = 32,
    moved: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Outcomes of rewards that run in this process: what they raise is caught, but only coroutines can be timed out.

    `moved` is called after each.
    """
    outcomes: dict[int, Outcome] = {}

    def graded(index: int, outcome: Outcome) -> None:
        outcomes[index] = outcome
        moved()

    call_rewards(environment, jobs, graded, seconds, concurrent)
    return [outcomes[index] for index in range(len(jobs))]


def totals(environment: Environment, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[Grade]:
    """The weighted sum of each job's rewards; 0 if they failed.

    Raises UserError for names that vary between examples, for a weight without a reward, and for a total that is too
    large.
    """
    grades: list[Grade] = []
    names: list[str] = []
    for (example, _), outcome in zip(jobs, outcomes, strict=True):
        if outcome.cause:
            grades.append(Grade(0.0, {}, outcome.cause))
            continue
        by_name = outcome.rewards
        names = names or list(by_name)
        if by_name.keys() != set(names):
            raise UserError(
                f"the rewards of {type(environment).__name__} are {', '.join(by_name)} for example {example.name}, but "
                f"{', '.join(names)} for another; give every example the same names"
            )
        grades.append(Grade(_total(environment, example, by_name), by_name))
    return grades


def _total(environment: Environment, example: Example, by_name: dict[str, float]) -> float:
    weights = environment.reward_weights
    if unknown := sorted(weights.keys() - by_name.keys()):
        raise UserError(
            f"{type(environment).__name__}.reward_weights names {unknown[0]!r}, which is not a reward of example "
            f"{example.name}.{closest(unknown[0], by_name)} There {'are' if len(by_name) > 1 else 'is'} "
            f"{', '.join(by_name)}"
        )
    total = sum(weights.get(n, 1.0) * v for n, v in by_name.items())
    if not abs(total) <= LARGEST:
        raise UserError(
            f"{type(environment).__name__}'s rewards add up to {total!r} for example {example.name}; make "
            "`reward_weights` and rewards finite and smaller"
        )
    return total


def failures(outcomes: Sequence[Outcome]) -> str:
    """How many rewards failed, by cause, and the first failure, in a sentence; empty if none did."""
    causes = Counter(o.cause for o in outcomes if o.cause)
    if not causes:
        return ""
    counted = ", ".join(f"{count} {cause}" for cause, count in causes.most_common())
    first = next(o.message for o in outcomes if o.cause)
    return f"{causes.total()} of {len(outcomes)} rewards failed ({counted}). The first: {first}"


def refuse_too_many(outcomes: Sequence[Outcome], limit: float) -> None:
    """Raises UserError if a larger fraction than `limit` failed."""
    if sum(bool(o.cause) for o in outcomes) > limit * len(outcomes):
        raise UserError(f"more rewards failed than rewards.failure_limit {limit:g} allows: {failures(outcomes)}")
