"""Encodes in separate processes, in order.

A worker is a plain child process that reads batches from its standard input and writes tokens to its standard output:
it ends when the pipe closes, however its parent died, and a Ctrl-C at the terminal does not reach it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lockstep.data.encode import Encoded, Encoder, batches
from lockstep.errors import UserError

IN_FLIGHT = 3
"""Batches per worker in flight."""


def encode_all(items: Iterable[Any], encoder: Encoder, workers: int = 0) -> Iterator[Encoded]:
    """Encodes the items in order, in `workers` processes, or in this one if `workers` is 0.

    An error in the source or in a worker is raised here, after the items before it have been yielded.
    """
    if not workers:
        for batch in batches(items, encoder):
            yield from encoder.encode(batch)
        return
    pool = _Pool(encoder, workers)
    try:
        pending: deque[Future[list[Encoded]]] = deque()
        for batch in batches(items, encoder):
            pending.append(pool.submit(batch))
            if len(pending) >= IN_FLIGHT * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.close()


class _Pool:
    """Worker processes, and as many threads that each send a batch and wait for the tokens."""

    def __init__(self, encoder: Encoder, workers: int):
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        self._workers = [_Worker(encoder) for _ in range(workers)]
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="encode")

    def submit(self, batch: list[Any]) -> Future[list[Encoded]]:
        return self._threads.submit(self._encode, batch)

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _encode(self, batch: list[Any]) -> list[Encoded]:
        worker = self._free.get()
        try:
            return worker.encode(batch)
        finally:
            self._free.put(worker)


class _Worker:
    def __init__(self, encoder: Encoder):
        root = str(Path(__file__).parents[2])
        path = python_path(root)
        # One thread per process: the processes share the cores.
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from lockstep.data.workers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        # Sent from a thread, so that this process reads data while the worker starts.
        self._first = threading.Thread(target=self._send, args=(encoder,), daemon=True)
        self._first.start()

    def encode(self, batch: list[Any]) -> list[Encoded]:
        self._first.join()
        self._send(batch)
        assert self.process.stdout is not None
        try:
            answer = pickle.load(self.process.stdout)
        except EOFError as error:
            code = self.process.wait()
            raise RuntimeError(f"a tokenizing process ended with code {code}; out of memory?") from error
        if isinstance(answer, BaseException):
            raise answer
        result: list[Encoded] = answer
        return result

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                # Unflushed data was for the process that has ended.
                with suppress(BrokenPipeError):
                    pipe.close()

    def _send(self, value: Any) -> None:
        assert self.process.stdin is not None
        try:
            pickle.dump(value, self.process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self.process.stdin.flush()
        except BrokenPipeError:  # reported when the answer is missing
            pass


def python_path(*first: str) -> str:
    """PYTHONPATH for a child started with -P: without empty entries, which mean the working folder, where files may
    shadow modules.
    """
    return os.pathsep.join([*first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def serve() -> None:
    """The worker's loop: reads an encoder, then batches until the pipe closes."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Output that libraries print must not mix with the answers.
    os.dup2(2, 1)
    encoder: Encoder = pickle.load(source)
    while True:
        try:
            batch = pickle.load(source)
        except EOFError:
            return
        try:
            answer: Any = encoder.encode(batch)
        except UserError as error:
            answer = error
        except Exception as error:
            answer = RuntimeError(f"tokenizing failed: {type(error).__name__}: {error}")
        try:
            pickle.dump(answer, sink, protocol=pickle.HIGHEST_PROTOCOL)
            sink.flush()
        except BrokenPipeError:
            return
