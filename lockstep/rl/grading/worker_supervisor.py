"""Supervises one worker: forks it from a process that has loaded the environment once, and enforces the limits.

`pool.py` starts the process. A worker that hangs, dies, forks too much or prints too much is killed with all its
descendants, and its replacement is ready in milliseconds, whatever the environment imports. The job that the worker
had started is at fault, unless earlier jobs may have left something behind (memory, threads, processes): then it is
graded again, alone in a new worker, before it is blamed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
from collections import deque
from typing import Any

from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading.calling import KILLED, MEMORY, OUTPUT, PROCESSES, TIMEOUT, call_problem, is_async
from lockstep.rl.grading.frames import Closed, PlainJob, chunk_of, decode, jobs_in, send, take
from lockstep.rl.grading.processes import descendants, end_tree
from lockstep.rl.grading.worker import STARTED, work

POLL_SECONDS = 0.1
"""Interval at which a worker's processes are counted while a reward runs."""
ANSWER_BYTES = 2**20
"""Maximum size of a message from a worker: a megabyte of reward names is not a reward."""
COROUTINES = 64
"""Maximum number of coroutines sent to a worker at once: if it dies, any could be the cause: each is regraded alone."""

CONVERSE = "converse"
"""Starts conversations, until both sides have sent DONE."""
DONE = "done"

Answer = list[Any]
"""[rewards, cause, message] of one job."""


class Worker:
    """A forked worker and the supervisor's ends of its pipes."""

    def __init__(self, environment: Environment, limits: dict[str, Any], trainer: tuple[int, int]):
        self.started = mmap.mmap(-1, STARTED.size)
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        self.output, output = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                for end in (self.requests, self.replies, self.output, *trainer):
                    os.close(end)
                work(environment, limits, self.started, requests, replies, output)
            finally:
                os._exit(1)
        for end in (requests, replies, output):
            os.close(end)
        for end in (self.requests, self.output):
            os.set_blocking(end, False)
        self.buffer = bytearray()
        self.unused = True

    def ends(self) -> tuple[int, int, int]:
        return self.requests, self.replies, self.output

    def end(self, spared: frozenset[int]) -> None:
        end_tree(self.process, spared)
        for end in self.ends():
            os.close(end)


class WorkerSupervisor:
    """Grades chunks of jobs with one worker at a time."""

    def __init__(self, environment: Environment, limits: dict[str, Any], orders: int, answers: int):
        self.environment, self.limits, self.trainer = environment, limits, (orders, answers)
        self.is_async = is_async(environment)
        self.worker: Worker | None = None
        self.environment_processes = frozenset(descendants(os.getpid()))
        """Processes that the environment started while it was loaded; they belong to no worker."""
        self.log_left = limits["output_kib"] * 1024
        """Bytes of output that are still logged."""

    def grade(self, count: int, chunk: bytes) -> list[Answer]:
        """The answer to each of the `count` jobs of a chunk, which is JSON, in order."""
        answers: dict[int, Answer] = {}
        jobs: list[PlainJob] = []  # decoded only if some must be sent again
        waiting, suspects = list(range(count)), deque[int]()
        while waiting or suspects:
            if suspects:
                self.end_worker()
                sent = [suspects.popleft()]
            else:
                size = COROUTINES if self.is_async else count
                sent, waiting = waiting[:size], waiting[size:]
            worker = self.worker = self.worker or Worker(self.environment, self.limits, self.trainer)
            fresh, worker.unused = worker.unused, False
            message: Any = chunk
            if len(sent) < count:
                jobs = jobs or jobs_in(decode(chunk))
                message = chunk_of([jobs[index] for index in sent])
            cause, current = self._run(worker, sent, message, answers)
            if not cause:
                continue
            self.end_worker()
            jobs = jobs or jobs_in(decode(chunk))
            # Any coroutine that has not answered may be at fault.
            started = [i for i in sent if i not in answers] if self.is_async else [sent[current]]
            waiting += [i for i in sent if i not in answers and i not in started]
            first = fresh and started == sent[:1]
            if started and (first or (cause == TIMEOUT and not self.is_async)):
                answers[started[0]] = [{}, cause, self.message(cause, jobs[started[0]][0])]
            else:
                suspects.extend(started)
        if self.worker and _data_bytes(self.worker.process) > self.limits["memory_gib"] * 2**29:
            self.end_worker()  # memory leaks: half of the limit is used
        return [answers[index] for index in range(count)]

    def end_worker(self) -> None:
        if self.worker:
            self.worker.end(self.environment_processes)
            self.worker = None

    def _run(self, worker: Worker, sent: list[int], chunk: Any, answers: dict[int, Answer]) -> tuple[str, int]:
        """Sends jobs to a worker and adds their results to `answers`.

        If a limit or the worker's death interrupts this, returns the cause and the index in `sent` of the job that the
        worker had started; otherwise an empty cause.
        """
        # A worker that dies before it starts counts as having started the first.
        worker.started[:] = STARTED.pack(0)
        try:
            send(worker.requests, chunk, seconds=self.limits["seconds"])
        except Closed:
            return KILLED, 0
        # Coroutines time out by themselves, unless one of them blocks the others.
        timeout = self.limits["seconds"] + (1.0 if self.is_async else 0.0)
        began = counted = time.monotonic()
        current, seen, printed, missing = 0, 0, 0, len(sent)
        while missing:
            pipes = [worker.replies, worker.output, self.trainer[0]]
            ready, _, _ = select.select(pipes, [], [], min(POLL_SECONDS, timeout))
            if self.trainer[0] in ready:  # the trainer sends nothing now, so it has ended
                self.end_worker()
                os._exit(0)
            now, (started,) = time.monotonic(), STARTED.unpack(worker.started[:])
            if started != seen or (self.is_async and worker.replies in ready):
                began, printed, seen, current = now, 0, started, min(max(started, 0), len(sent) - 1)
            if now - counted >= POLL_SECONDS:
                counted = now
                # Counts descendants of this process, which adopts orphans of the worker's children; 1 is the worker.
                if len(descendants(os.getpid())) - len(self.environment_processes) - 1 > self.limits["processes"]:
                    return PROCESSES, current
            # Output is read before the answer that follows it. If another job has started meanwhile, it is unknown
            # which of the two printed it.
            printed += self.read_output(worker.output)
            if STARTED.unpack(worker.started[:]) != (started,):
                printed = 0
            if printed > self.limits["output_kib"] * 1024:
                return OUTPUT, current
            if worker.replies in ready:
                data = os.read(worker.replies, 2**16)
                if not data:
                    return KILLED, current
                worker.buffer += data
                try:
                    while (batch := take(worker.buffer, ANSWER_BYTES)) is not None:
                        for index, *result in batch:
                            if sent[index] in answers:
                                return KILLED, current
                            if result[1] == MEMORY:
                                return MEMORY, index
                            answers[sent[index]] = result
                            missing -= 1
                except (Closed, LookupError, TypeError, ValueError):
                    return KILLED, current  # a reward wrote into its worker's pipes
            elif now >= began + timeout:
                return TIMEOUT, current
        return "", 0

    def read_output(self, output: int) -> int:
        """Reads output of a process, logs it up to the limit, and returns the number of bytes."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while count <= self.limits["output_kib"] * 1024 and (data := os.read(output, 2**16)):
                count += len(data)
                if logged := data[: self.log_left]:
                    self.log_left -= len(logged)
                    with contextlib.suppress(OSError):  # a full disk only costs the log
                        os.write(2, logged)
        return count

    def message(self, cause: str, example: dict[str, Any], method: str = "reward") -> str:
        """The message for the user about a call that was killed."""
        limits = self.limits
        problem = {
            TIMEOUT: f"took longer than rewards.seconds {limits['seconds']:g}",
            MEMORY: f"needed more than rewards.memory_gib {limits['memory_gib']:g}",
            KILLED: "ended its worker process",
            PROCESSES: f"started more than rewards.processes {limits['processes']}",
            OUTPUT: f"printed more than rewards.output_kib {limits['output_kib']}",
        }[cause]
        return call_problem(self.environment, Example(**example), problem, method)


def _data_bytes(process: int) -> int:
    """Approximately what RLIMIT_DATA counts; 0 if the kernel does not report it."""
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
