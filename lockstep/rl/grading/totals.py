"""From rewards by name to the total used in training, and the limit on failed rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.errors import UserError, closest
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading.calling import LARGEST, Job, Outcome, call_rewards

if TYPE_CHECKING:
    from lockstep.config import RewardConfig  # its import would slow down the start of every sandbox


@dataclass(frozen=True)
class Grade:
    """A completion's rewards by name, and their weighted total, which training uses."""

    total: float
    by_name: dict[str, float]
    failure: str = ""
    """Cause of a failure: `timeout`, `raised`, `memory` …; empty if there are rewards."""


def grade(environment: Environment, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
    """Grades each completion of the corresponding example, in this process.

    A single number is named `reward`; True and False are 1 and 0. Raises UserError, naming the example, for a reward
    that is NaN, above `LARGEST` or not a number, for names that vary between examples, and for an error in the
    environment's code.
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
    on_progress: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Grades jobs in this process. Exceptions become outcomes, but only coroutines can time out.

    `on_progress` is called after each job.
    """
    outcomes: dict[int, Outcome] = {}

    def report(index: int, outcome: Outcome) -> None:
        outcomes[index] = outcome
        on_progress()

    call_rewards(environment, jobs, report, seconds, concurrent)
    return [outcomes[index] for index in range(len(jobs))]


@dataclass(frozen=True)
class InProcessGrader:
    """A Grader that runs the environment's rewards in this process."""

    environment: Environment
    config: RewardConfig
    on_progress: Callable[[], None] = lambda: None
    """Called, from any thread, after each job."""

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        return grade_here(self.environment, jobs, self.config.seconds, self.config.concurrent, self.on_progress)


def totals(environment: Environment, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[Grade]:
    """The weighted sum of each job's rewards; 0 if they failed.

    Raises UserError for names that vary between examples, a weight without a reward, and a total above `LARGEST`.
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
    """A sentence with the number of failed rewards by cause, and the first failure; empty if there are none."""
    causes = Counter(o.cause for o in outcomes if o.cause)
    if not causes:
        return ""
    counted = ", ".join(f"{count} {cause}" for cause, count in causes.most_common())
    first = next(o.message for o in outcomes if o.cause)
    return f"{causes.total()} of {len(outcomes)} rewards failed ({counted}). The first: {first}"


def refuse_too_many(outcomes: Sequence[Outcome], limit: float) -> None:
    """Raises UserError if more than the fraction `limit` failed."""
    if sum(bool(o.cause) for o in outcomes) > limit * len(outcomes):
        raise UserError(f"more rewards failed than rewards.failure_limit {limit:g} allows: {failures(outcomes)}")
