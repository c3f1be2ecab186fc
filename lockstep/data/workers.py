"""Encodes in worker processes, in order."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from lockstep.data.encode import Encoded, Encoder, batches
from lockstep.errors import UserError
from lockstep.workers import Worker, WorkerEnded

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
            answer = pickle.loads(worker.ask(pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)))
        except WorkerEnded as error:
            raise RuntimeError(f"tokenizing failed: {error}") from error
        finally:
            self._free.put(worker)
        if isinstance(answer, BaseException):
            raise answer
        result: list[Encoded] = answer
        return result


def batch_encoder() -> Callable[[bytes], bytes]:
    """What a process answers with: the first request is the encoder, the others are batches. All are pickled."""
    encoder: Encoder | None = None

    def answer(request: bytes) -> bytes:
        nonlocal encoder
        if encoder is None:
            encoder = pickle.loads(request)
            return b""
        try:
            encoded: Any = encoder.encode(pickle.loads(request))
        except UserError as error:
            encoded = error
        except Exception as error:
            encoded = RuntimeError(f"tokenizing failed: {type(error).__name__}: {error}")
        return pickle.dumps(encoded, protocol=pickle.HIGHEST_PROTOCOL)

    return answer
