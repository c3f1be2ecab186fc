"""Encodes in worker processes, in order."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np

from lockstep.data.encode import Branch, Encoded, Encoder, batches
from lockstep.errors import UserError
from lockstep.workers import Closed, Worker, WorkerEnded, from_plain

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
        # One thread per process: the processes share the cores.
        environment = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        first = pickle.dumps(encoder, protocol=pickle.HIGHEST_PROTOCOL)
        self._workers = [
            Worker("lockstep.data.workers:batch_encoder", first, environment=environment, max_bytes=2**32)
            for _ in range(workers)
        ]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="encode")

    def submit(self, batch: list[Any]) -> Future[list[Encoded]]:
        return self._threads.submit(self._encode, batch)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=True)

    def _encode(self, batch: list[Any]) -> list[Encoded]:
        worker = self._free.get()
        try:
            answer = worker.ask(pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL))
            documents, problem, is_users = from_plain(answer)
        except (WorkerEnded, Closed) as error:
            raise RuntimeError(f"tokenizing failed: {error}") from error
        finally:
            self._free.put(worker)
        if problem:
            raise UserError(problem) if is_users else RuntimeError(f"tokenizing failed: {problem}")
        return [_unpacked(*document) for document in documents]


def batch_encoder() -> Callable[[bytes], bytes]:
    """What a process answers with: the first request is the encoder, the others are batches, both pickled.

    Answers are plain: (documents, what went wrong, whether that is a UserError).
    """
    encoder: Encoder | None = None

    def answer(request: bytes) -> bytes:
        nonlocal encoder
        if encoder is None:
            encoder = pickle.loads(request)
            return b""
        result: tuple[list[Any], str, bool]
        try:
            result = [_packed(one) for one in encoder.encode(pickle.loads(request))], "", False
        except UserError as error:
            result = [], str(error), True
        except Exception as error:
            result = [], f"{type(error).__name__}: {error}", False
        return pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)

    return answer


def _packed(one: Encoded) -> tuple[Any, ...]:
    """A document of plain types."""
    arrays = [None if values is None else (values.dtype.str, values.tobytes()) for values in (one.tokens, one.scored)]
    return *arrays, [tuple(branch) for branch in one.branches], one.ends, one.problem, one.left_out


def _unpacked(tokens: Any, scored: Any, branches: Any, ends: bool, problem: str, left_out: str) -> Encoded:
    tokens, scored = (values and np.frombuffer(values[1], values[0]) for values in (tokens, scored))
    return Encoded(tokens, scored, ends, problem, [Branch(*branch) for branch in branches], left_out)
