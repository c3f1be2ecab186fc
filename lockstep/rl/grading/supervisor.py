"""The process that has loaded an environment once, forks its workers, relays their messages, and enforces the limits.

`pool.py` starts it. A worker grades chunks of jobs, or runs one conversation or one group's `grade`. One that hangs,
dies, forks too much or prints too much is killed with all its descendants; another is ready in milliseconds, whatever
the environment imports. The supervisor decodes no task, answer or reward: it reads the first line of a message, which
is JSON, and passes on the rest.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import time
from collections import deque
from typing import Any

from lockstep.rl.environments.loading import load_environment
from lockstep.rl.environments.protocol import Environment
from lockstep.rl.grading.calling import KILLED, OUTPUT, PROCESSES, TIMEOUT, error_text, is_async
from lockstep.rl.grading.exchange import (
    ANSWER,
    ASKED,
    BEGIN,
    DONE,
    END,
    END_ALL,
    EVENTS,
    MAX_BYTES,
    REWARD,
    REWARDED,
    STARTED,
    failed,
    header,
    message,
)
from lockstep.rl.grading.worker import run_tasks
from lockstep.workers import Closed, Stream, from_json, standard_stream, to_json
from lockstep.workers.processes import adopt_orphans, descendants, end_tree

POLL_SECONDS = 0.1
"""Interval at which limits are checked, and processes counted."""
ALIVE = 4
"""Up to this many times rewards.concurrent conversations are alive at a time, as most of them wait for the model."""


def main() -> None:
    """Loads the environment and reports to the trainer; then follows its orders until it is gone."""
    trainer = standard_stream()  # output of the environment while it is loaded goes to the log
    adopt_orphans()
    with contextlib.suppress(Closed):
        setup = from_json(trainer.receive())
        try:
            environment = load_environment(**setup["environment"])
        except BaseException as error:
            trainer.send(to_json({"error": error_text(error)}))
            return
        about = {"error": "", "name": type(environment).__name__, "is_async": is_async(environment)}
        trainer.send(to_json(about))
        supervisor = Supervisor(environment, setup["limits"], trainer)
        try:
            supervisor.run()
        finally:
            supervisor.end()


class Worker:
    """A forked process, its task, and the supervisor's ends of its pipes."""

    def __init__(self, supervisor: Supervisor):
        self.task: int | None = None
        """Number of its task."""
        self.kind = ""
        self.deadline: float | None = None
        """When the reward, or the environment's turn, must have ended; None while it waits for work or the model."""
        self.began = self.seconds = 0.0
        """Start of the environment's turn, and the total of the turns before it."""
        self.printed = 0
        """Bytes, by the reward or the conversation."""
        self.is_mute = False
        """Whether it has closed its output."""
        self.is_over = False
        """Whether its conversation is at a limit and gets no more replies."""
        self.started, self.seen = mmap.mmap(-1, STARTED.size), 0
        """Index of the job that a plain reward has started: shared memory, and what was last read of it."""
        ours, theirs = socket.socketpair()
        self.output, output = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            for end in (ours.detach(), theirs.detach(), self.output, output):
                os.close(end)
            raise
        if self.pid == 0:
            try:
                for end in (ours.detach(), self.output, *supervisor.ends()):
                    os.close(end)
                run_tasks(supervisor.environment, supervisor.limits, self.started, theirs.detach(), output)
            finally:
                os._exit(1)
        theirs.close()
        os.close(output)
        os.set_blocking(self.output, False)
        end = ours.detach()
        self.stream = Stream(end, end, MAX_BYTES)

    def begin(self, order: bytes, number: int, kind: str) -> None:
        """Passes a task to it."""
        self.task, self.kind, self.seen, self.printed = number, kind, 0, 0
        self.started[:] = STARTED.pack(0)
        with contextlib.suppress(Closed):  # its end is noticed in `Supervisor._relay`
            self.stream.put(order)

    def begin_turn(self, seconds: float) -> None:
        """Starts the environment's turn, or that of a reward, of at most `seconds`."""
        now = time.monotonic()
        if self.deadline is None:
            self.began = now
        self.deadline = now + seconds

    def end_turn(self) -> None:
        if self.deadline is not None:
            self.seconds += time.monotonic() - self.began
        self.deadline = None


class Supervisor:
    """Runs tasks in workers: rewards in one that is kept, each conversation and `grade` in its own."""

    def __init__(self, environment: Environment, limits: dict[str, Any], trainer: Stream):
        self.environment, self.limits, self._trainer = environment, limits, trainer
        seconds = limits["seconds"]
        # Coroutines time out by themselves, unless one of them blocks the others.
        self._reward_seconds = seconds + (1.0 if is_async(environment) else 0.0)
        # A conversation's process can report its timeout itself, with the line that blocks.
        self._turn_seconds = seconds + 1.0 + min(2.0, seconds / 2)
        self._workers: dict[int, Worker] = {}
        """By their task's number."""
        self._grader: Worker | None = None
        """The worker for rewards; also in `_workers` while it has a task."""
        self._waiting: deque[tuple[bytes, int, str]] = deque()
        """Conversations that have not begun."""
        self._answers: deque[tuple[bytes, int, bool]] = deque()
        self._environment_processes = frozenset(descendants(os.getpid()))
        """Processes that the environment started while it was loaded; they belong to no worker."""
        self._log_left = limits["output_kib"] * 1024
        """Bytes of output that are still logged."""
        self._counted = time.monotonic()

    def ends(self) -> list[int]:
        """The descriptors that a worker must not have."""
        workers = {*self._workers.values(), *([self._grader] if self._grader else ())}
        trainer = self._trainer.reads, self._trainer.writes
        return [*trainer, *(end for worker in workers for end in (worker.stream.reads, worker.output))]

    def run(self) -> None:
        """Runs until the trainer is gone, and then raises Closed."""
        while True:
            ready = self._wait()
            if self._trainer.reads in ready:
                for order in self._trainer.received():
                    self._handle(order)
            for worker in list(self._workers.values()):
                if cause := self._relay(worker, ready):
                    self._fail(worker, cause)
            self._check_descendants()
            self._begin_turns()
            self._trainer.flush()

    def end(self) -> None:
        """Ends all workers."""
        self._end_conversations()
        if self._grader:
            self._end(self._grader)

    def _end_conversations(self) -> None:
        self._waiting.clear()
        self._answers.clear()
        for worker in list(self._workers.values()):
            if worker is not self._grader:
                self._end(worker)

    def _handle(self, order: bytes) -> None:
        match header(order):
            case [kind, int(number), str(method), bool(fresh)] if kind == BEGIN:
                if method == REWARD:
                    self._begin_rewards(order, number, fresh)
                else:
                    self._waiting.append((order, number, method))
            case [kind, int(number), bool(is_over)] if kind == ANSWER:
                self._answers.append((order, number, is_over))
            case [kind, int(number)] if kind == END and number in self._workers:
                self._end(self._workers[number])
            case [kind] if kind == END_ALL:
                self._end_conversations()
                self._trainer.put(message(DONE))

    def _begin_rewards(self, order: bytes, number: int, fresh: bool) -> None:
        """fresh: in a new worker. One that still has a task, which the trainer has abandoned, is replaced too."""
        if self._grader and (fresh or self._grader.task is not None):
            self._end(self._grader)
        self._begin(order, number, REWARD)

    def _begin(self, order: bytes, number: int, kind: str) -> None:
        """Gives a task to a new worker, but rewards to the one that is kept."""
        try:
            worker = (self._grader if kind == REWARD else None) or Worker(self)
        except OSError as error:
            self._trainer.put(failed(number, KILLED, f"could not start a process ({error})"))
            return
        worker.begin(order, number, kind)
        worker.begin_turn(self._reward_seconds if kind == REWARD else self._turn_seconds)
        self._workers[number] = worker
        if kind == REWARD:
            self._grader = worker

    def _begin_turns(self) -> None:
        """Lets up to `rewards.concurrent` environments run; those of started conversations come first."""
        talking = [worker for worker in self._workers.values() if worker is not self._grader]
        slots = self.limits["concurrent"] - sum(worker.deadline is not None for worker in talking)
        while slots > 0 and self._answers:
            answer, number, is_over = self._answers.popleft()
            if worker := self._workers.get(number):  # it may have ended in the meantime
                slots -= worker.deadline is None
                worker.begin_turn(self._turn_seconds)
                worker.is_over = worker.is_over or is_over
                with contextlib.suppress(Closed):  # its end is noticed in `_relay`
                    worker.stream.put(answer)
        alive = len(talking)
        while slots > 0 and self._waiting and alive < ALIVE * self.limits["concurrent"]:
            self._begin(*self._waiting.popleft())
            slots, alive = slots - 1, alive + 1

    def _wait(self) -> set[int]:
        """Waits up to POLL_SECONDS; returns the descriptors that are ready."""
        poll = select.poll()
        # Backpressure: reads nothing while the trainer does not read.
        is_listening = len(self._trainer.unsent) < MAX_BYTES
        streams = [worker.stream for worker in self._workers.values()] if is_listening else []
        for stream in [self._trainer, *streams]:
            for end, event in stream.events().items():
                poll.register(end, event)
        for worker in self._workers.values():
            if not worker.is_mute:
                poll.register(worker.output, select.POLLIN)
        return {end for end, _ in poll.poll(1000 * min(POLL_SECONDS, self.limits["seconds"]))}

    def _relay(self, worker: Worker, ready: set[int]) -> str:
        """Passes a worker's messages to the trainer; returns the cause if it must be killed."""
        (started,) = STARTED.unpack(worker.started[:])
        if worker.kind == REWARD and (started != worker.seen or worker.stream.reads in ready):
            # The next job has begun, or some coroutine has ended.
            worker.begin_turn(self._reward_seconds)
            worker.printed = 0 if started != worker.seen else worker.printed
            worker.seen = started
        # Output is read before the answer that follows it. If another job has started meanwhile, it is unknown which of
        # the two printed it.
        if worker.output in ready:
            self._read_output(worker)
        if STARTED.unpack(worker.started[:]) != (started,):
            worker.printed = 0
        if worker.printed > self.limits["output_kib"] * 1024:
            return OUTPUT
        if worker.stream.reads in ready:
            try:
                for event in worker.stream.received():
                    if not self._pass_on(worker, event):
                        return ""
                worker.stream.flush()
            except (Closed, TypeError, ValueError):
                return KILLED  # or the environment wrote into the pipe
        if worker.deadline is not None and time.monotonic() > worker.deadline:
            return TIMEOUT
        return ""

    def _pass_on(self, worker: Worker, event: bytes) -> bool:
        """Passes an event to the trainer; returns whether the worker's task continues. Raises for one that is not of
        its task: the environment wrote into the pipe."""
        kind, number, is_last = header(event)
        if number != worker.task or kind not in EVENTS[worker.kind]:
            raise ValueError(f"an event {kind} of task {number}")
        if kind == ASKED and worker.is_over:
            return True  # its time continues, whatever it requests
        goes_on = kind == ASKED or (kind == REWARDED and not is_last)
        if kind != REWARDED or is_last:
            worker.end_turn()
        if not goes_on and worker is not self._grader:
            self._end(worker)
        self._trainer.put(message(kind, number, not goes_on, worker.seconds, body=event[event.find(b"\n") + 1 :]))
        if not goes_on and worker is self._grader:
            del self._workers[number]
            worker.task = None
            if _data_bytes(worker.pid) > self.limits["memory_gib"] * 2**29:
                self._end(worker)  # memory leaks: half of the limit is used
        return goes_on

    def _check_descendants(self) -> None:
        if time.monotonic() - self._counted >= POLL_SECONDS:
            for worker in list(self._workers.values()):
                if len(descendants(worker.pid)) > self.limits["processes"]:
                    self._fail(worker, PROCESSES)
            self._counted = time.monotonic()

    def _fail(self, worker: Worker, cause: str) -> None:
        """Ends a worker, and reports the cause, the job that it had started, and the seconds of the environment."""
        number = worker.task
        assert number is not None
        worker.end_turn()
        self._end(worker)
        self._trainer.put(failed(number, cause, current=worker.seen, seconds=worker.seconds))

    def _end(self, worker: Worker) -> None:
        if worker.task is not None:
            del self._workers[worker.task]
        if worker is self._grader:
            self._grader = None
        others = [*self._workers.values(), *([self._grader] if self._grader else ())]
        end_tree(worker.pid, self._environment_processes | {other.pid for other in others})
        os.close(worker.stream.reads)
        os.close(worker.output)

    def _read_output(self, worker: Worker) -> None:
        """Counts output of a worker, and logs it, up to the limit."""
        with contextlib.suppress(BlockingIOError):
            while worker.printed <= self.limits["output_kib"] * 1024:
                data = os.read(worker.output, 2**16)
                if not data:
                    worker.is_mute = True
                    return
                worker.printed += len(data)
                if logged := data[: self._log_left]:
                    self._log_left -= len(logged)
                    with contextlib.suppress(OSError):  # a full disk only costs the log
                        os.write(2, logged)


def _data_bytes(process: int) -> int:
    """Approximately what RLIMIT_DATA counts; 0 if the kernel does not report it."""
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
