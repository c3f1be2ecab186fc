"""Conversations in separate processes: their keeper starts them, passes messages on, and enforces the limits.

Each is a process forked from the keeper, which has loaded the environment: whatever one of them does, the others are
not affected and need not be restarted.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lockstep.rl.conversations.exchange import Asked, Ended, Graded, data_of, said_of
from lockstep.rl.conversations.process import converse
from lockstep.rl.grading.calling import KILLED, OUTPUT, PROCESSES, TIMEOUT, failure
from lockstep.rl.grading.frames import Closed, Stream
from lockstep.rl.grading.processes import descendants, end_tree
from lockstep.rl.grading.worker import confine
from lockstep.rl.grading.worker_supervisor import DONE, POLL_SECONDS, WorkerSupervisor

MOST_BYTES = 2**25
"""Most bytes in one message of a conversation."""
ALIVE = 4
"""This many times rewards.concurrent conversations may be alive at a time: most of them wait for the model."""


def grace(seconds: float) -> float:
    """How long after its time is up a process may take to report that itself, and where."""
    return 1.0 + min(2.0, seconds / 2)


def supervise_conversations(supervisor: WorkerSupervisor, inbox: bytearray) -> None:
    """Runs until the trainer is done. `inbox`: orders received so far. Raises Closed if the trainer is gone."""
    orders, answers = supervisor.trainer
    stream = Stream(orders, answers)
    stream.inbox += inbox
    inbox.clear()
    conversations = _Conversations(supervisor, stream)
    try:
        conversations.keep()
    finally:
        conversations.end_all()
        os.set_blocking(orders, True)
    inbox += stream.inbox


class _Process:
    """A conversation's process, and its keeper's ends of its pipes."""

    def __init__(self, supervisor: WorkerSupervisor, number: int, task: dict[str, Any], others: list[_Process]):
        self.number, self.task = number, task
        self.until: float | None = None
        """The end of the environment's time; None while the model has its turn."""
        self.began = self.seconds = 0.0
        """When the environment's turn began, and the total of those before it."""
        self.printed = 0
        self.over = False
        """Whether it was told that there are no more replies."""
        ours, theirs = socket.socketpair()
        self.output, output = os.pipe()
        try:
            self.process = os.fork()
        except OSError:
            for end in (ours.detach(), theirs.detach(), self.output, output):
                os.close(end)
            raise
        if self.process == 0:
            try:
                ends = [
                    ours.detach(),
                    self.output,
                    *supervisor.trainer,
                    *(supervisor.worker.ends() if supervisor.worker else ()),
                ]
                for end in ends + [end for other in others for end in (other.stream.reads, other.output)]:
                    os.close(end)
                confine(supervisor.limits, output)
                converse(supervisor.environment, supervisor.limits, number, task, theirs.detach(), MOST_BYTES)
            finally:
                os._exit(1)
        theirs.close()
        os.close(output)
        os.set_blocking(self.output, False)
        end = ours.detach()
        self.stream: Stream = Stream(end, end)

    def give_turn(self, seconds: float) -> None:
        """Starts the environment's time, of at most `seconds`."""
        now = time.monotonic()
        if self.until is None:
            self.began = now
        self.until = now + seconds + grace(seconds)

    def end_turn(self) -> None:
        if self.until is not None:
            self.seconds += time.monotonic() - self.began
        self.until = None

    def end(self, spared: frozenset[int]) -> None:
        end_tree(self.process, spared)
        os.close(self.stream.reads)
        os.close(self.output)


class _Conversations:
    """All unfinished conversations."""

    def __init__(self, supervisor: WorkerSupervisor, trainer: Stream):
        self.supervisor, self.trainer, self.limits = supervisor, trainer, supervisor.limits
        self.alive: dict[int, _Process] = {}
        self.beginning: deque[tuple[int, dict[str, Any]]] = deque()
        self.answers: deque[tuple[int, Any]] = deque()
        self.counted = time.monotonic()

    def keep(self) -> None:
        ready = {self.trainer.reads}  # some input has arrived before
        while True:
            if self.trainer.reads in ready and any([self._obey(order) for order in self.trainer.messages()]):
                break
            for process in list(self.alive.values()):
                if cause := self._attend(process, ready):
                    self._end(process, self._failed(process, cause))
            self._count()
            self._give_turns()
            self.trainer.flush()
            ready = self._wait()
        self.end_all()
        self.trainer.put(DONE)
        while self.trainer.outbox:
            self._wait()
            self.trainer.flush()

    def end_all(self) -> None:
        for process in list(self.alive.values()):
            self._end(process)

    def _obey(self, order: Any) -> bool:
        """Whether the trainer is done."""
        if order == DONE:
            return True
        word, number, *rest = order
        if word == "begin":
            self.beginning.append((number, rest[0]))
        elif number in self.alive:  # it may have ended in the meantime
            self.answers.append((number, rest))
        return False

    def _give_turns(self) -> None:
        """Gives `rewards.concurrent` environments their turn at a time; conversations already started come first."""
        places = self.limits["concurrent"] - sum(one.until is not None for one in self.alive.values())
        while places > 0 and self.answers:
            number, answer = self.answers.popleft()
            if process := self.alive.get(number):
                places -= process.until is None
                process.give_turn(self.limits["seconds"])
                process.over = process.over or answer[1] is None
                with suppress(Closed):  # its end is noticed in `_attend`
                    process.stream.put(answer)
        while places > 0 and self.beginning and len(self.alive) < ALIVE * self.limits["concurrent"]:
            number, task = self.beginning.popleft()
            places -= 1
            try:
                process = _Process(self.supervisor, number, task, list(self.alive.values()))
            except OSError as error:
                problem = failure(KILLED, f"could not start a process for a conversation ({error})")
                self.trainer.put(data_of(Ended(number, [], False, problem, {})))
                continue
            process.give_turn(self.limits["seconds"])
            self.alive[number] = process

    def _wait(self) -> set[int]:
        """The file descriptors that are ready, after at most POLL_SECONDS."""
        poll = select.poll()
        streams = [one.stream for one in self.alive.values()]
        # Backpressure: nothing is read while the trainer does not read.
        listening = len(self.trainer.outbox) < MOST_BYTES
        for stream in [self.trainer, *(streams if listening else [])]:
            events: dict[int, int] = {}
            for end, event in stream.events():
                events[end] = events.get(end, 0) | event
            for end, event in events.items():
                poll.register(end, event)
        for process in self.alive.values():
            poll.register(process.output, select.POLLIN)
        return {end for end, _ in poll.poll(1000 * POLL_SECONDS)}

    def _attend(self, process: _Process, ready: set[int]) -> str:
        """Passes on its messages; returns the cause if it must be killed."""
        if process.output in ready:
            process.printed += self.supervisor.read_output(process.output)
        if process.printed > self.limits["output_kib"] * 1024:
            return OUTPUT
        if process.stream.reads in ready:
            try:
                for data in process.stream.messages(MOST_BYTES):
                    said = said_of(data, process.number)
                    if isinstance(said, Graded if process.task["method"] == "converse" else Asked):
                        return KILLED  # nothing waits for that: it wrote into the pipe itself
                    if not isinstance(said, Asked):
                        self._end(process, said)
                        return ""
                    if process.over:
                        continue  # its time runs on, whatever it asks
                    process.end_turn()
                    self.trainer.put(data_of(said))
                process.stream.flush()
            except (Closed, TypeError, ValueError, OverflowError):
                return KILLED  # or broken by writing into its own pipe
        if process.until is not None and time.monotonic() > process.until:
            return TIMEOUT
        return ""

    def _count(self) -> None:
        if time.monotonic() - self.counted < POLL_SECONDS:
            return
        for process in list(self.alive.values()):
            if len(descendants(process.process)) > self.limits["processes"]:
                self._end(process, self._failed(process, PROCESSES))
        self.counted = time.monotonic()

    def _failed(self, process: _Process, cause: str) -> Ended:
        message = self.supervisor.message(cause, process.task["example"], process.task["method"])
        return Ended(process.number, [], False, failure(cause, message), {})

    def _end(self, process: _Process, said: Ended | Graded | None = None) -> None:
        process.end_turn()
        del self.alive[process.number]
        worker = [self.supervisor.worker.process] if self.supervisor.worker else []
        process.end(self.supervisor.own | {*worker, *(one.process for one in self.alive.values())})
        if isinstance(said, Ended) and not said.environment_seconds:
            # It was killed before it could report how long it took.
            said = replace(said, environment_seconds=process.seconds)
        if said is not None:
            self.trainer.put(data_of(said))
