"""Runs math-verify in a worker process, which is ended at a limit.

math-verify's timeouts are signals, which only a process's main thread receives, and which do not interrupt C code.
A reward can run in any thread of the trainer, where an answer such as 9^{9^{9^9}} must not block the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lockstep.workers import Worker, WorkerEnded, from_json, to_json

SECONDS = 3.0
"""Limit of processor time per comparison, so that a busy machine does not make correct answers time out."""
TINY = 1e-4
MEMORY_BYTES = 2 * 2**30


class MathChecker:
    """Compares answers, one at a time. Its process starts with the first, and restarts after it was ended."""

    def __init__(self, seconds: float = SECONDS):
        factory = "lockstep.rl.environments.math_checker:comparison"
        self._worker = Worker(factory, seconds=seconds, memory=MEMORY_BYTES)

    def equal(self, answer: str, given: str) -> bool:
        """Whether `given` equals `answer`; False at a timeout or if either cannot be parsed."""
        try:
            self._worker.start()
        except WorkerEnded as error:
            raise RuntimeError(
                "math-verify does not run; see why with `python -c 'from lockstep.rl.environments.math_checker import "
                'compare; print(compare("1", "1"))\'`'
            ) from error
        try:
            return from_json(self._worker.ask(to_json([answer, given]))) is True
        except WorkerEnded:
            return False


def comparison() -> Callable[[bytes], bytes]:
    """What the process answers with."""
    logging.disable()  # math-verify warns of each comparison that it has no timeout
    compare("x+1", "1+x")  # also imports what expressions need
    return lambda request: to_json(compare(*from_json(request)))


def compare(answer: str, given: str) -> bool:
    """Whether math-verify considers two answers, the contents of `\\boxed{…}`, equal."""
    from math_verify import parse, verify

    expected, actual = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, given))
    try:
        equal = bool(expected) and bool(actual) and bool(verify(expected, actual, timeout_seconds=None))
        return equal and not _tiny_and_different(expected[0], actual[0])
    except (RecursionError, MemoryError):
        return False


def _tiny_and_different(expected: Any, actual: Any) -> bool:
    """Whether both are tiny numbers that differ: math-verify rounds to six decimals, so that it treats them as 0."""
    try:
        one, other = (abs(float(number)) for number in (expected, actual))
    except (TypeError, ValueError, OverflowError):
        return False
    return max(one, other) < TINY and abs(one - other) > 1e-3 * max(one, other)
