"""The process that keeps one worker: loads the environment once, forks the worker from it, and enforces the limits.

Started by `workers.py`. A worker that hangs, dies, forks too much or prints too much is killed with all its
descendants, and the next one is ready in milliseconds, whatever the environment imports. The job that the worker had
started is at fault, unless earlier jobs may have left something behind (memory, threads, processes): then it is graded
again by a new worker, alone, before it is blamed.
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
from lockstep.rl.grading.calling import KILLED, MEMORY, OUTPUT, PROCESSES, TIMEOUT, about, is_async
from lockstep.rl.grading.frames import Closed, PlainJob, chunk_of, decode, jobs_in, send, take
from lockstep.rl.grading.processes import descendants, end_tree
from lockstep.rl.grading.worker import BEGUN, work

POLL_SECONDS = 0.1
"""Interval at which a worker's processes are counted while a reward runs."""
ANSWER_BYTES = 2**20
"""Most bytes of one answer: a megabyte of reward names is not a reward."""
COROUTINES = 64
"""Most that a worker is given at once: when it dies, any of them may be at fault, and each is graded alone."""

CONVERSE = "converse"
"""Starts conversations, until both sides have sent DONE."""
DONE = "done"

Answer = list[Any]
"""[rewards, cause, message] of one job."""


class Worker:
    """A forked worker and the ends of its pipes."""

    def __init__(self, environment: Environment, limits: dict[str, Any], trainer: tuple[int, int]):
        self.begun = mmap.mmap(-1, BEGUN.size)
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        self.output, output = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                for end in (self.requests, self.replies, self.output, *trainer):
                    os.close(end)
                work(environment, limits, self.begun, requests, replies, output)
            finally:
                os._exit(1)
        for end in (requests, replies, output):
            os.close(end)
        for end in (self.requests, self.output):
            os.set_blocking(end, False)
        self.buffer = bytearray()
        self.unused = True

    def ends(self) -> tuple[int, int, int]:
        """The keeper's ends of its pipes."""
        return self.requests, self.replies, self.output

    def end(self, spared: frozenset[int]) -> None:
        end_tree(self.process, spared)
        for end in self.ends():
            os.close(end)


class WorkerSupervisor:
    """Grades chunks of jobs with one worker at a time."""

    def __init__(self, environment: Environment, limits: dict[str, Any], orders: int, answers: int):
        self.environment, self.limits, self.trainer = environment, limits, (orders, answers)
        self.all_at_once = is_async(environment)
        self.worker: Worker | None = None
        # Processes that the environment started while it was loaded belong to no worker.
        self.own = frozenset(descendants(os.getpid()))
        self.log_left = limits["output_kib"] * 1024

    def grade(self, count: int, chunk: bytes) -> list[Answer]:
        """The answer to each of the `count` jobs of a chunk, which is JSON, in order."""
        answers: dict[int, Answer] = {}
        jobs: list[PlainJob] = []  # decoded only if some must be sent again
        waiting, suspects = list(range(count)), deque[int]()
        while waiting or suspects:
            if suspects:
                self.end_worker()
                asked = [suspects.popleft()]
            else:
                most = COROUTINES if self.all_at_once else count
                asked, waiting = waiting[:most], waiting[most:]
            worker = self.worker = self.worker or Worker(self.environment, self.limits, self.trainer)
            fresh, worker.unused = worker.unused, False
            message: Any = chunk
            if len(asked) < count:
                jobs = jobs or jobs_in(decode(chunk))
                message = chunk_of([jobs[index] for index in asked])
            cause, begun = self._ask(worker, asked, message, answers)
            if not cause:
                continue
            self.end_worker()
            jobs = jobs or jobs_in(decode(chunk))
            # With coroutines, any that has not answered may be at fault.
            begun_jobs = [i for i in asked if i not in answers] if self.all_at_once else [asked[begun]]
            waiting += [i for i in asked if i not in answers and i not in begun_jobs]
            first = fresh and begun_jobs == asked[:1]
            if begun_jobs and (first or (cause == TIMEOUT and not self.all_at_once)):
                answers[begun_jobs[0]] = [{}, cause, self.message(cause, jobs[begun_jobs[0]][0])]
            else:
                suspects.extend(begun_jobs)
        if self.worker and _data_bytes(self.worker.process) > self.limits["memory_gib"] * 2**29:
            self.end_worker()  # it leaks: half of the limit is used up
        return [answers[index] for index in range(count)]

    def end_worker(self) -> None:
        if self.worker:
            self.worker.end(self.own)
            self.worker = None

    def _ask(self, worker: Worker, asked: list[int], chunk: Any, answers: dict[int, Answer]) -> tuple[str, int]:
        """Fills in `answers`; returns the cause that ended the worker before all were there, if any, and the index in
        `asked` of the job that it had started."""
        # A worker that dies before it starts counts as having started the first.
        worker.begun[:] = BEGUN.pack(0)
        try:
            send(worker.requests, chunk, seconds=self.limits["seconds"])
        except Closed:
            return KILLED, 0
        # Coroutines have their own timeouts, unless one of them blocks the others.
        patience = self.limits["seconds"] + (1.0 if self.all_at_once else 0.0)
        began = counted = time.monotonic()
        begun, seen, printed, missing = 0, 0, 0, len(asked)
        while missing:
            pipes = [worker.replies, worker.output, self.trainer[0]]
            ready, _, _ = select.select(pipes, [], [], min(POLL_SECONDS, patience))
            if self.trainer[0] in ready:  # nothing else is expected from it now: the trainer is gone
                self.end_worker()
                os._exit(0)
            now, (newly,) = time.monotonic(), BEGUN.unpack(worker.begun[:])
            if newly != seen or (self.all_at_once and worker.replies in ready):
                began, printed, seen, begun = now, 0, newly, min(max(newly, 0), len(asked) - 1)
            if now - counted >= POLL_SECONDS:
                counted = now
                # Counted below this process, which adopts orphans of the worker's children, and minus the worker.
                if len(descendants(os.getpid())) - len(self.own) - 1 > self.limits["processes"]:
                    return PROCESSES, begun
            # Output is read before the answer that follows it. If another job has begun meanwhile, whose it was is
            # not known.
            printed += self.read_output(worker.output)
            if BEGUN.unpack(worker.begun[:]) != (newly,):
                printed = 0
            if printed > self.limits["output_kib"] * 1024:
                return OUTPUT, begun
            if worker.replies in ready:
                read = os.read(worker.replies, 2**16)
                if not read:
                    return KILLED, begun
                worker.buffer += read
                try:
                    while (batch := take(worker.buffer, ANSWER_BYTES)) is not None:
                        for place, *result in batch:
                            if asked[place] in answers:
                                return KILLED, begun
                            if result[1] == MEMORY:
                                return MEMORY, place
                            answers[asked[place]] = result
                            missing -= 1
                except (Closed, LookupError, TypeError, ValueError):
                    return KILLED, begun  # a reward wrote into its worker's pipes
            elif now >= began + patience:
                return TIMEOUT, begun
        return "", 0

    def read_output(self, output: int) -> int:
        """Reads what was printed, logs the beginning of it, and returns the number of bytes."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while count <= self.limits["output_kib"] * 1024 and (read := os.read(output, 2**16)):
                count += len(read)
                if kept := read[: self.log_left]:
                    self.log_left -= len(kept)
                    with contextlib.suppress(OSError):  # a full disk only costs the log
                        os.write(2, kept)
        return count

    def message(self, cause: str, example: dict[str, Any], method: str = "reward") -> str:
        """What the user is told about a call that was killed for a cause."""
        limits = self.limits
        problem = {
            TIMEOUT: f"took longer than rewards.seconds {limits['seconds']:g}",
            MEMORY: f"needed more than rewards.memory_gib {limits['memory_gib']:g}",
            KILLED: "ended its worker process",
            PROCESSES: f"started more than rewards.processes {limits['processes']}",
            OUTPUT: f"printed more than rewards.output_kib {limits['output_kib']}",
        }[cause]
        return about(self.environment, Example(**example), problem, method)


def _data_bytes(process: int) -> int:
    """Approximately what RLIMIT_DATA counts; 0 if the kernel does not report it."""
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
