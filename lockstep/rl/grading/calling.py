"""Calls an environment's reward once per completion; the outcome is plain data."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.errors import one_line
from lockstep.python_file import user_line
from lockstep.rl.environments.protocol import Environment, Example, source_file

if TYPE_CHECKING:
    from lockstep.config import RewardConfig  # its import would slow down the start of every sandbox

LARGEST = 1e18
"""Largest magnitude of a reward: squares of larger rewards, or of their differences, overflow float32 in training."""

RAISED, INVALID, TIMEOUT, MEMORY = "raised", "invalid", "timeout", "memory"
KILLED, PROCESSES, OUTPUT = "killed", "processes", "output"
CAUSES = (RAISED, INVALID, TIMEOUT, MEMORY, KILLED, PROCESSES, OUTPUT)


@dataclass(frozen=True)
class Outcome:
    """Rewards by name, or the cause of their failure and a message for the user."""

    rewards: dict[str, float] = field(default_factory=dict)
    cause: str = ""
    message: str = ""


def failure(cause: str, message: str) -> Outcome:
    """A failed outcome. The message becomes one line without control characters, so that it cannot forge log lines."""
    return Outcome(cause=cause, message=one_line(message, 2000))


def error_text(error: BaseException) -> str:
    """The error's type and message. Does not raise, even if the error's `__str__` does."""
    try:
        message = str(error)
    except BaseException:
        message = "its message cannot be read"
    return f"{type(error).__name__}: {message}"


Job = tuple[Example, str]
"""An example and a completion to grade."""
PATIENCE = 10
"""The run ends if a function blocks the trainer's event loop for this many times rewards.seconds."""


class Grader(Protocol):
    """Grades jobs, in this process or in workers."""

    @property
    def config(self) -> RewardConfig: ...

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcome of each job, in order. Does not raise if a reward fails."""
        ...


def call_rewards(
    environment: Environment,
    jobs: Sequence[Job],
    report: Callable[[int, Outcome], None],
    seconds: float | None = None,
    concurrent: int = 32,
) -> None:
    """Calls `report(index, outcome)` for each job as soon as it is graded.

    Plain functions run one after another, without a timeout; up to `concurrent` coroutines run at a time, each for at
    most `seconds`.
    """
    if not is_async(environment):
        for index, (example, completion) in enumerate(jobs):
            try:
                outcome = outcome_of(environment.reward(example, completion), environment, example)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # including SystemExit, which is the reward's
                outcome = outcome_of_error(error, environment, example)
            report(index, outcome)
        return

    async def call(index: int, job: Job, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                outcome = outcome_of(await with_timeout(seconds, _reward(environment, *job)), environment, job[0])
            except BaseException as error:
                outcome = outcome_of_error(error, environment, job[0])
            report(index, outcome)

    async def call_all() -> None:
        slots = asyncio.Semaphore(concurrent)
        await asyncio.gather(*(call(index, job, slots) for index, job in enumerate(jobs)))

    called = asyncio.run_coroutine_threadsafe(call_all(), event_loop())
    try:
        called.result()
    finally:
        called.cancel()  # no effect if it is done


class TimeUpError(Exception):
    """A coroutine exceeded its time limit."""


async def with_timeout(seconds: float | None, value: Awaitable[Any]) -> Any:
    """The result of `value`. Raises TimeUpError after `seconds`, even if it ignores its cancellation."""
    task = asyncio.ensure_future(value)
    task.add_done_callback(retrieve_error)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()  # no effect if it is done
    if not task.done():
        raise TimeUpError
    return task.result()


def retrieve_error(task: asyncio.Future[Any]) -> None:
    """Retrieves a task's error: asyncio would warn about one that nobody awaits, as after a timeout."""
    if not task.cancelled():
        task.exception()


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop for rewards of all steps, as network clients belong to the loop that created them."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="rewards", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop, and again after SystemExit or KeyboardInterrupt in a task, on which asyncio stops it."""
    while not loop.is_closed():
        with suppress(SystemExit, KeyboardInterrupt):  # raised by a reward: this thread receives no signals
            loop.run_forever()


def is_async(environment: Environment) -> bool:
    """Whether any of the rewards is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, (environment.reward, *environment.rewards.values())))


async def _reward(environment: Environment, example: Example, completion: str) -> Any:
    value = environment.reward(example, completion)
    if inspect.isawaitable(value):
        value = await value
    if isinstance(value, dict):
        value = {name: await one if inspect.isawaitable(one) else one for name, one in value.items()}
    return value


def outcome_of_error(
    error: BaseException, environment: Environment, example: Example, method: str = "reward"
) -> Outcome:
    """The outcome of a call of `method` that raised, ran out of memory or timed out."""
    if isinstance(error, MemoryError):
        return failure(MEMORY, call_problem(environment, example, "ran out of memory", method))
    if isinstance(error, TimeUpError):
        return failure(TIMEOUT, call_problem(environment, example, "took longer than rewards.seconds", method))
    where = user_line(error, source_file(type(environment)))
    problem = f"failed on example {example.name} ({error_text(error)})"
    return failure(RAISED, f"{where}: {type(environment).__name__}.{method} {problem}")


def call_problem(environment: Environment, example: Example, problem: str, method: str = "reward") -> str:
    """A message about a call of `method`, as in `Task.reward ran out of memory for example 7`."""
    return f"{type(environment).__name__}.{method} {problem} for example {example.name}"


def outcome_of(value: Any, environment: Environment, example: Example, method: str = "reward") -> Outcome:
    """Rewards by name, from the value that `method` returned; INVALID unless they are finite and at most LARGEST."""
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not rewards and environment.has_rewards:
        return failure(INVALID, call_problem(environment, example, "returned no reward", method))
    checked: dict[str, float] = {}
    for name, reward in rewards.items():
        number = finite_number(reward)
        if number is None:
            problem = call_problem(environment, example, f"returned {_value_text(reward)} as {name!r}", method)
            return failure(INVALID, f"{problem}; return a number of at most {LARGEST:g}, or a dict of them")
        checked[str(name)] = number
    return Outcome(checked)


def finite_number(value: Any) -> float | None:
    """The value as a float; None if it is not a number, not finite or too large."""
    # Real, an abstract class, is checked last: it takes seven times as long.
    if not isinstance(value, (float, int, Real)) and not _is_numpy_bool(value):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= LARGEST else None


def _is_numpy_bool(value: Any) -> bool:
    """NumPy's bool is not a Real. Checked by name, so that workers need not import NumPy."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _value_text(value: Any) -> str:
    # Python refuses to print integers of thousands of digits.
    text = f"an int of {value.bit_length()} bits" if isinstance(value, int) else repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def outcome_from(answer: Any) -> Outcome:
    """The outcome from a worker's [rewards, cause, message], which is not trusted: finite numbers by name, or a cause.

    Empty rewards pass here, as some environments have none; `refuse_none` refuses them for the others.
    """
    try:
        rewards, cause, message = answer
        if cause:
            return failure(cause if cause in CAUSES else KILLED, str(message))
        numbers = {str(name): number for name, value in rewards.items() if (number := finite_number(value)) is not None}
    except (TypeError, ValueError, AttributeError) as error:
        return failure(KILLED, f"a worker returned something that is not a reward ({error})")
    if len(numbers) < len(rewards):
        return failure(KILLED, "a worker returned something that is not a number")
    return Outcome(numbers)


def refuse_none(outcome: Outcome, environment: Environment) -> Outcome:
    """The outcome; a failure if it has neither rewards nor a cause, although the environment has rewards."""
    if outcome.rewards or outcome.cause or not environment.has_rewards:
        return outcome
    return failure(KILLED, "a worker returned something that is not a number")
