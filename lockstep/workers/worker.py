"""A Python process that answers requests, with limits on its processor time and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO

from lockstep.workers.messages import MAX_BYTES, Closed, Stream
from lockstep.workers.processes import extend_time_limit, limit_memory

START_SECONDS = 120.0
"""Timeout to start a process and import what it needs, which takes a second on an idle machine."""
PATIENCE = 40
"""The wall-clock limit of an answer is this many times that of its processor time, as the machine may be busy."""


def start_python(
    code: str,
    stderr: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    working_folder: bool = False,
    max_bytes: int = MAX_BYTES,
) -> tuple[subprocess.Popen[bytes], Stream]:
    """Runs `code` in a process with this one's module search path, and the stream to its `standard_stream`.

    working_folder: whether an entry of the path that means the working folder is kept; files there may shadow modules.
    """
    path = [entry or os.getcwd() for entry in sys.path if entry or working_folder]
    process = subprocess.Popen(
        # -P leaves the working folder out of the path until it is replaced.
        [sys.executable, "-P", "-c", f"import sys; sys.path[:] = sys.argv[1:]; {code}", *path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        bufsize=0,
        start_new_session=True,  # a Ctrl-C at the terminal does not reach it
        env={**os.environ, **(environment or {})},
    )
    assert process.stdin and process.stdout
    return process, Stream(process.stdout.fileno(), process.stdin.fileno(), max_bytes)


def standard_stream(max_bytes: int = MAX_BYTES) -> Stream:
    """Standard input and output of this process as a stream; what else reads or writes them gets nothing, or stderr."""
    stream = Stream(os.dup(0), os.dup(1), max_bytes)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return stream


class WorkerEnded(Exception):
    """The worker's process has ended, or was ended at a limit; the message says why."""


class Worker:
    """A process that answers one request at a time. It starts with the first, and again after it has ended.

    It ends with this object, or when its pipe closes, however its parent died. Thread-safe; in a forked child of its
    owner it starts another process.
    """

    def __init__(
        self,
        factory: str,
        first: bytes | None = None,
        *,
        seconds: float | None = None,
        memory: int | None = None,
        environment: Mapping[str, str] | None = None,
        max_bytes: int = MAX_BYTES,
    ):
        """factory: `module:function`, called there; it returns a function from a request's bytes to the answer's.

        first: a request that precedes all others after each start. seconds: of processor time per answer; the system
        counts whole ones. memory: bytes of private memory. max_bytes: of an answer.
        """
        module, function = factory.split(":")
        self._code = (
            f"from lockstep.workers.worker import serve; from {module} import {function}; "
            f"serve({function}, {seconds}, {memory})"
        )
        self._first, self._first_answer = first, b""
        self._seconds, self._environment, self._max_bytes = seconds, environment, max_bytes
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self) -> bytes:
        """Starts the process unless it runs; returns its answer to the first request. Raises as `ask`."""
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._start()
            return self._first_answer

    def ask(self, request: bytes) -> bytes:
        """Sends a request and returns the answer. Raises WorkerEnded if there is none."""
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._start()
            try:
                return self._answer(request, None if self._seconds is None else PATIENCE * self._seconds)
            except BaseException:  # including a signal's, after which the answer would be taken for the next one's
                self._stop()
                raise

    def end(self) -> None:
        """Ends the process, also while another thread waits for its answer."""
        self._end()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._process, self._stream = start_python(self._code, environment=self._environment, max_bytes=self._max_bytes)
        self._end = weakref.finalize(self, _end, self._process, self._owner)
        try:
            self._receive(START_SECONDS)
            if self._first is not None:
                self._first_answer = self._answer(self._first, START_SECONDS)
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        self._process = None
        self._end()

    def _answer(self, request: bytes, seconds: float | None) -> bytes:
        with suppress(Closed):  # reported when the answer is missing
            self._stream.send(request, seconds=None)
        return self._receive(seconds)

    def _receive(self, seconds: float | None) -> bytes:
        try:
            return self._stream.receive(seconds)
        except Closed as closed:
            raise WorkerEnded(self._why(closed)) from closed

    def _why(self, closed: Closed) -> str:
        """Why there is no answer."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        if code == -signal.SIGXCPU:
            return f"it takes more than {self._seconds:g} seconds"
        return str(closed) if code is None else f"its process ended with code {code}; out of memory?"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # else this is a forked child, which has copies
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def serve(factory: Callable[[], Callable[[bytes], bytes]], seconds: float | None, memory: int | None) -> None:
    """The process of a `Worker`: answers requests until its input ends."""
    stream = standard_stream(2**32)
    if memory is not None:
        limit_memory(memory)
    answer = factory()
    with suppress(Closed):  # the parent has ended
        stream.send(b"ready")
        while True:
            request = stream.receive()
            if seconds is not None:
                extend_time_limit(seconds)
            stream.send(answer(request), seconds=None)
