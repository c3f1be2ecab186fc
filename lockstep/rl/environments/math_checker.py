"""Runs math-verify in a separate process, which is killed at a timeout.

math-verify's timeouts are signals, which only a process's main thread receives, and which do not interrupt C code.
A reward can run in any thread of the trainer, where an answer such as 9^{9^{9^9}} must not block the run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import subprocess
import sys
import threading
import time
from typing import Any

START_SECONDS = 120.0
"""Timeout to import sympy, which takes a second on an idle machine."""
SECONDS = 3.0
"""Limit of processor time per comparison, so that a busy machine does not make correct answers time out."""
PATIENCE = 40
"""The wall-clock limit is this many times the limit of processor time."""
TINY = 1e-4
MEMORY_BYTES = 2 * 2**30


class MathChecker:
    """Compares answers, one at a time. Its process starts with the first, and restarts after it was killed."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds = seconds
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0

    def equal(self, answer: str, given: str) -> bool:
        """Whether `given` equals `answer`; False at a timeout or if either cannot be parsed."""
        with self.lock:
            if self.process is None or self.owner != os.getpid():  # else a fork would share its parent's pipes
                self._start()
            try:
                return self._ask([answer, given], self.seconds) is True
            except (OSError, ValueError, TimeoutError):
                self._end()
                return False

    def _start(self) -> None:
        self.process, self.owner = None, os.getpid()
        # The module search path is that of this process.
        code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); " + (
            "from lockstep.rl.environments.math_checker import serve; serve()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps([path or os.getcwd() for path in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        try:
            self._ask(["x+1", "1+x"], START_SECONDS)  # also imports what expressions need
        except (OSError, ValueError, TimeoutError) as error:
            self._end()
            raise RuntimeError(
                "math-verify does not run; see why with `python -c 'from lockstep.rl.environments.math_checker import "
                'compare; print(compare("1", "1"))\'`'
            ) from error

    def _ask(self, question: list[str], seconds: float) -> Any:
        assert self.process and self.process.stdin and self.process.stdout
        pid, answer = self.process.pid, bytearray()
        limit, deadline = _processor_seconds(pid) + seconds, time.monotonic() + PATIENCE * seconds
        self.process.stdin.write(json.dumps(question).encode() + b"\n")  # fits into the pipe
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        while not answer.endswith(b"\n"):
            if not poll.poll(1000 * max(0.02, min(limit - _processor_seconds(pid), deadline - time.monotonic()))):
                if _processor_seconds(pid) >= limit or time.monotonic() >= deadline:
                    raise TimeoutError
                continue
            part = os.read(self.process.stdout.fileno(), 4096)
            if not part:
                raise OSError("its process has ended")
            answer += part
        return json.loads(answer)

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self.process = None


def _processor_seconds(pid: int) -> float:
    """Processor time of a process so far; wall-clock time on systems that do not report it."""
    if sys.platform != "linux":
        return time.monotonic()
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock id of clock_getcpuclockid(3)
    except OSError:  # it has ended and was reaped
        return math.inf


def serve() -> None:
    """The process: compares answers, one line of JSON each, until its input ends."""
    from lockstep.rl.grading.processes import die_with_parent

    die_with_parent()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    out = os.dup(1)
    os.dup2(2, 1)  # keeps other output out of the answers
    for line in sys.stdin.buffer:
        os.write(out, json.dumps(compare(*json.loads(line))).encode() + b"\n")


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
