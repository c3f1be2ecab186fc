"""math-verify in a separate process, which is killed if it takes too long.

Its timeouts are signals, which only the main thread of a process receives, and which do not interrupt C code. A reward
can run in any thread of the trainer, where an answer such as 9^{9^{9^9}} must not hold up the run.
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
"""To import sympy: takes a second if the machine is not busy."""
SECONDS = 3.0
"""Processor time that one comparison may take: on a busy machine a right answer must not be given up."""
PATIENCE = 40
"""By the clock, it may take this many times as long."""
TINY = 1e-4
MEMORY_BYTES = 2 * 2**30


class MathChecker:
    """Compares answers, one at a time. Its process starts with the first, and again after it had to be killed."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds = seconds
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0

    def equal(self, answer: str, given: str) -> bool:
        """Whether `given` is equal to `answer`; False if that takes too long or cannot be parsed."""
        with self.lock:
            if self.process is None or self.owner != os.getpid():  # a fork would share its parent's pipes
                self._start()
            try:
                return self._ask([answer, given], self.seconds) is True
            except (OSError, ValueError, TimeoutError):
                self._end()
                return False

    def _start(self) -> None:
        self.process, self.owner = None, os.getpid()
        # With the same module search path as this process.
        code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); " + (
            "from lockstep.rl.environments.math_checker import serve; serve()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps([place or os.getcwd() for place in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        try:
            self._ask(["x+1", "1+x"], START_SECONDS)  # loads what expressions need, too
        except (OSError, ValueError, TimeoutError) as error:
            self._end()
            raise RuntimeError(
                "math-verify does not run; see why with `python -c 'from lockstep.rl.environments.math_checker import "
                'compare; print(compare("1", "1"))\'`'
            ) from error

    def _ask(self, question: list[str], seconds: float) -> Any:
        assert self.process and self.process.stdin and self.process.stdout
        pid, answer = self.process.pid, bytearray()
        limit, until = _processor_seconds(pid) + seconds, time.monotonic() + PATIENCE * seconds
        self.process.stdin.write(json.dumps(question).encode() + b"\n")  # which fits into the pipe
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        while not answer.endswith(b"\n"):
            if not poll.poll(1000 * max(0.02, min(limit - _processor_seconds(pid), until - time.monotonic()))):
                if _processor_seconds(pid) >= limit or time.monotonic() >= until:
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
    """That a process has taken so far; where that cannot be told, the time by the clock."""
    if sys.platform != "linux":
        return time.monotonic()
    try:
        return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes a process's clock
    except OSError:  # it has ended, and was waited for
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

    wanted, found = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, given))
    try:
        equal = bool(wanted) and bool(found) and bool(verify(wanted, found, timeout_seconds=None))
        return equal and not _tiny_and_different(wanted[0], found[0])
    except (RecursionError, MemoryError):
        return False


def _tiny_and_different(wanted: Any, found: Any) -> bool:
    """Numbers that math-verify, which compares six decimals or 15 digits of the difference, takes for 0."""
    try:
        one, other = (abs(float(number)) for number in (wanted, found))
    except (TypeError, ValueError, OverflowError):
        return False
    return max(one, other) < TINY and abs(one - other) > 1e-3 * max(one, other)
