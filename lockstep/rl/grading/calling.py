"""Calls an environment's reward once per completion, and returns the outcome as plain data."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from lockstep.errors import one_line
from lockstep.rl.environments.protocol import Environment, Example, source_file, user_line

LARGEST = 1e18
"""Training uses float32, in which the square of a larger reward, or of a difference, would be infinite."""

RAISED, INVALID, TIMEOUT, MEMORY = "raised", "invalid", "timeout", "memory"
KILLED, PROCESSES, OUTPUT = "killed", "processes", "output"
CAUSES = (RAISED, INVALID, TIMEOUT, MEMORY, KILLED, PROCESSES, OUTPUT)


@dataclass(frozen=True)
class Outcome:
    """Rewards by name, or the cause why there are none and a sentence for the user."""

    rewards: dict[str, float] = field(default_factory=dict)
    cause: str = ""
    message: str = ""


def failure(cause: str, message: str) -> Outcome:
    """The message is put on one line, without control characters: a reward could forge log lines or terminal output."""
    return Outcome(cause=cause, message=one_line(message, 2000))


def described(error: BaseException) -> str:
    """Its type and message, unless that raises in turn."""
    try:
        said = str(error)
    except BaseException:
        said = "its message cannot be read"
    return f"{type(error).__name__}: {said}"


Job = tuple[Example, str]
"""What is graded: an example and a completion of it."""
PATIENCE = 10
"""A function may block the trainer's event loop for this many times rewards.seconds before the run ends."""

Grader = Callable[[Sequence[Job]], list[Outcome]]
"""Rewards, wherever they run: the outcome of each job, in the same order. Does not raise if a reward fails."""


def call_rewards(
    environment: Environment,
    jobs: Sequence[Job],
    report: Callable[[int, Outcome], None],
    seconds: float | None = None,
    concurrent: int = 32,
) -> None:
    """Calls `report(index, outcome)` for each job as soon as it is graded.

    Plain functions run one after another; coroutines `concurrent` at a time, each for at most `seconds`. Nothing here
    can interrupt a plain function.
    """
    if not is_async(environment):
        for index, (example, completion) in enumerate(jobs):
            try:
                outcome = outcome_of(environment.reward(example, completion), environment, example)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # including SystemExit, which is the reward's
                outcome = failed(error, environment, example)
            report(index, outcome)
        return

    async def call(index: int, job: Job, places: asyncio.Semaphore) -> None:
        async with places:
            try:
                outcome = outcome_of(await within(seconds, _value(environment, *job)), environment, job[0])
            except BaseException as error:
                outcome = failed(error, environment, job[0])
            report(index, outcome)

    async def call_all() -> None:
        places = asyncio.Semaphore(concurrent)
        await asyncio.gather(*(call(index, job, places) for index, job in enumerate(jobs)))

    called = asyncio.run_coroutine_threadsafe(call_all(), event_loop())
    try:
        called.result()
    finally:
        called.cancel()  # no effect if it is done


class TimeUpError(Exception):
    """A coroutine exceeded its time limit."""


async def within(seconds: float | None, value: Awaitable[Any]) -> Any:
    """The result of `value`. Raises TimeUpError after `seconds`, even if it keeps running despite being cancelled."""
    task = asyncio.ensure_future(value)
    task.add_done_callback(heard)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()  # no effect if it is done
    if not task.done():
        raise TimeUpError
    return task.result()


def heard(task: asyncio.Future[Any]) -> None:
    """Retrieves an error, as asyncio warns about errors never retrieved, such as one after a timeout."""
    if not task.cancelled():
        task.exception()


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all steps: network clients belong to the loop that created them. A notebook has its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="rewards", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Restarts the loop: asyncio ends it on SystemExit or KeyboardInterrupt in a task, after notifying the awaiter."""
    while not loop.is_closed():
        with suppress(SystemExit, KeyboardInterrupt):  # this thread gets no signals: a reward raised them
            loop.run_forever()


def is_async(environment: Environment) -> bool:
    """Whether any of the rewards is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, (environment.reward, *environment.rewards.values())))


async def _value(environment: Environment, example: Example, completion: str) -> Any:
    value = environment.reward(example, completion)
    if inspect.isawaitable(value):
        value = await value
    if isinstance(value, dict):
        value = {name: await one if inspect.isawaitable(one) else one for name, one in value.items()}
    return value


def failed(error: BaseException, environment: Environment, example: Example, method: str = "reward") -> Outcome:
    """The outcome of a call that ended with an error, or was ended."""
    if isinstance(error, MemoryError):
        return failure(MEMORY, about(environment, example, "ran out of memory", method))
    if isinstance(error, TimeUpError):
        return failure(TIMEOUT, about(environment, example, "took longer than rewards.seconds", method))
    return raised(error, environment, example, method)


def raised(error: BaseException, environment: Environment, example: Example, method: str = "reward") -> Outcome:
    """The outcome of a call that raised: with file and line, and the error's message."""
    where = user_line(error, source_file(type(environment)))
    said = f"failed on example {example.name} ({described(error)})"
    return failure(RAISED, f"{where}: {type(environment).__name__}.{method} {said}")


def about(environment: Environment, example: Example, problem: str, method: str = "reward") -> str:
    return f"{type(environment).__name__}.{method} {problem} for example {example.name}"


def outcome_of(value: Any, environment: Environment, example: Example, method: str = "reward") -> Outcome:
    """Rewards by name, from what `method` returned: finite numbers of at most LARGEST, or INVALID."""
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not rewards and environment.has_rewards:
        return failure(INVALID, about(environment, example, "returned no reward", method))
    checked: dict[str, float] = {}
    for name, value_of_name in rewards.items():
        number = finite(value_of_name)
        if number is None:
            problem = about(environment, example, f"returned {_shown(value_of_name)} as {name!r}", method)
            return failure(INVALID, f"{problem}; return a number of at most {LARGEST:g}, or a dict of them")
        checked[str(name)] = number
    return Outcome(checked)


def finite(value: Any) -> float | None:
    """The value as a float; None if it is not a number, not finite or too large."""
    # Real alone, an abstract class, takes seven times as long.
    if not isinstance(value, (float, int, Real)) and not _is_numpy_bool(value):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= LARGEST else None


def _is_numpy_bool(value: Any) -> bool:
    """Whether it is NumPy's bool, which is not a Real. Checked by name, as a worker need not import NumPy."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _shown(value: Any) -> str:
    # Python refuses to print integers of thousands of digits.
    text = f"an int of {value.bit_length()} bits" if isinstance(value, int) else repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def outcome_from(answer: Any) -> Outcome:
    """[rewards, cause, message] from another process, checked by the trainer: finite numbers by name, or a cause.

    Rewards can be empty for an environment that has none; for any other, `refuse_none` reports it.
    """
    try:
        rewards, cause, message = answer
        if cause:
            return failure(cause if cause in CAUSES else KILLED, str(message))
        numbers = {str(name): number for name, value in rewards.items() if (number := finite(value)) is not None}
    except (TypeError, ValueError, AttributeError) as error:
        return failure(KILLED, f"a worker returned something that is not a reward ({error})")
    if len(numbers) < len(rewards):
        return failure(KILLED, "a worker returned something that is not a number")
    return Outcome(numbers)


def refuse_none(outcome: Outcome, environment: Environment) -> Outcome:
    """The outcome, or a failure if there is neither a reward nor a cause although the environment has rewards."""
    if outcome.rewards or outcome.cause or not environment.has_rewards:
        return outcome
    return failure(KILLED, "a worker returned something that is not a number")
