"""Conversations in separate processes: their supervisor forks them, relays messages, and enforces the limits.

Each is forked from the supervisor, which has loaded the environment, so a crash of one does not affect the others.
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

from lockstep.rl.conversations.exchange import (
    ConversationEnded,
    GroupGraded,
    ReplyRequest,
    event_data,
    event_from,
)
from lockstep.rl.conversations.process import run_task
from lockstep.rl.grading.calling import KILLED, OUTPUT, PROCESSES, TIMEOUT, failure
from lockstep.rl.grading.frames import Closed, Stream
from lockstep.rl.grading.processes import descendants, end_tree
from lockstep.rl.grading.worker import confine
from lockstep.rl.grading.worker_supervisor import DONE, POLL_SECONDS, WorkerSupervisor

MAX_BYTES = 2**25
"""Maximum size of one message of a conversation."""
ALIVE = 4
"""Up to this many times rewards.concurrent conversations are alive at a time, as most of them wait for the model."""


def grace(seconds: float) -> float:
    """Seconds after its timeout in which a process can report the timeout itself, with the line that blocks."""
    return 1.0 + min(2.0, seconds / 2)


def supervise_conversations(supervisor: WorkerSupervisor, inbox: bytearray) -> None:
    """Runs until the trainer sends DONE. `inbox`: bytes received so far. Raises Closed if the trainer is gone."""
    orders, answers = supervisor.trainer
    stream = Stream(orders, answers)
    stream.inbox += inbox
    inbox.clear()
    conversations = _Conversations(supervisor, stream)
    try:
        conversations.run()
    finally:
        conversations.end_all()
        os.set_blocking(orders, True)
    inbox += stream.inbox


class _Process:
    """A conversation's process, and the supervisor's ends of its pipes."""

    def __init__(self, supervisor: WorkerSupervisor, number: int, task: dict[str, Any], others: list[_Process]):
        self.number, self.task = number, task
        self.deadline: float | None = None
        """The end of the environment's time; None during the model's turn."""
        self.began = self.seconds = 0.0
        """Start of the environment's turn, and the total of the turns before it."""
        self.printed = 0
        self.over = False
        """Whether it is at a limit and gets no more replies."""
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
                run_task(supervisor.environment, supervisor.limits, number, task, theirs.detach(), MAX_BYTES)
            finally:
                os._exit(1)
        theirs.close()
        os.close(output)
        os.set_blocking(self.output, False)
        end = ours.detach()
        self.stream: Stream = Stream(end, end)

    def begin_turn(self, seconds: float) -> None:
        """Starts the environment's turn, of at most `seconds`."""
        now = time.monotonic()
        if self.deadline is None:
            self.began = now
        self.deadline = now + seconds + grace(seconds)

    def end_turn(self) -> None:
        if self.deadline is not None:
            self.seconds += time.monotonic() - self.began
        self.deadline = None

    def end(self, spared: frozenset[int]) -> None:
        end_tree(self.process, spared)
        os.close(self.stream.reads)
        os.close(self.output)


class _Conversations:
    """All unfinished conversations."""

    def __init__(self, supervisor: WorkerSupervisor, trainer: Stream):
        self.supervisor, self.trainer, self.limits = supervisor, trainer, supervisor.limits
        self.alive: dict[int, _Process] = {}
        self.waiting: deque[tuple[int, dict[str, Any]]] = deque()
        self.answers: deque[tuple[int, Any]] = deque()
        self.counted = time.monotonic()

    def run(self) -> None:
        ready = {self.trainer.reads}  # the inbox may have complete orders
        while True:
            if self.trainer.reads in ready and any([self._handle(order) for order in self.trainer.messages()]):
                break
            for process in list(self.alive.values()):
                if cause := self._relay(process, ready):
                    self._end(process, self._failed(process, cause))
            self._check_descendants()
            self._begin_turns()
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

    def _handle(self, order: Any) -> bool:
        """Whether the order is DONE."""
        if order == DONE:
            return True
        kind, number, *rest = order
        if kind == "begin":
            self.waiting.append((number, rest[0]))
        elif number in self.alive:  # it may have ended in the meantime
            self.answers.append((number, rest))
        return False

    def _begin_turns(self) -> None:
        """Lets up to `rewards.concurrent` environments run; those of started conversations come first."""
        slots = self.limits["concurrent"] - sum(process.deadline is not None for process in self.alive.values())
        while slots > 0 and self.answers:
            number, answer = self.answers.popleft()
            if process := self.alive.get(number):
                slots -= process.deadline is None
                process.begin_turn(self.limits["seconds"])
                process.over = process.over or answer[1] is None
                with suppress(Closed):  # its end is noticed in `_relay`
                    process.stream.put(answer)
        while slots > 0 and self.waiting and len(self.alive) < ALIVE * self.limits["concurrent"]:
            number, task = self.waiting.popleft()
            slots -= 1
            try:
                process = _Process(self.supervisor, number, task, list(self.alive.values()))
            except OSError as error:
                problem = failure(KILLED, f"could not start a process for a conversation ({error})")
                self.trainer.put(event_data(ConversationEnded(number, [], False, problem, {})))
                continue
            process.begin_turn(self.limits["seconds"])
            self.alive[number] = process

    def _wait(self) -> set[int]:
        """Waits up to POLL_SECONDS; returns the file descriptors that are ready."""
        poll = select.poll()
        streams = [process.stream for process in self.alive.values()]
        # Backpressure: reads nothing while the trainer does not read.
        is_listening = len(self.trainer.outbox) < MAX_BYTES
        for stream in [self.trainer, *(streams if is_listening else [])]:
            events: dict[int, int] = {}
            for end, event in stream.events():
                events[end] = events.get(end, 0) | event
            for end, event in events.items():
                poll.register(end, event)
        for process in self.alive.values():
            poll.register(process.output, select.POLLIN)
        return {end for end, _ in poll.poll(1000 * POLL_SECONDS)}

    def _relay(self, process: _Process, ready: set[int]) -> str:
        """Relays its events to the trainer; returns the cause if it must be killed."""
        if process.output in ready:
            process.printed += self.supervisor.read_output(process.output)
        if process.printed > self.limits["output_kib"] * 1024:
            return OUTPUT
        if process.stream.reads in ready:
            try:
                for data in process.stream.messages(MAX_BYTES):
                    event = event_from(data, process.number)
                    if isinstance(event, GroupGraded if process.task["method"] == "converse" else ReplyRequest):
                        return KILLED  # not an event of this task: the environment wrote into the pipe
                    if not isinstance(event, ReplyRequest):
                        self._end(process, event)
                        return ""
                    if process.over:
                        continue  # its time continues, whatever it requests
                    process.end_turn()
                    self.trainer.put(event_data(event))
                process.stream.flush()
            except (Closed, TypeError, ValueError, OverflowError):
                return KILLED  # or the environment wrote into the pipe
        if process.deadline is not None and time.monotonic() > process.deadline:
            return TIMEOUT
        return ""

    def _check_descendants(self) -> None:
        if time.monotonic() - self.counted < POLL_SECONDS:
            return
        for process in list(self.alive.values()):
            if len(descendants(process.process)) > self.limits["processes"]:
                self._end(process, self._failed(process, PROCESSES))
        self.counted = time.monotonic()

    def _failed(self, process: _Process, cause: str) -> ConversationEnded:
        message = self.supervisor.message(cause, process.task["example"], process.task["method"])
        return ConversationEnded(process.number, [], False, failure(cause, message), {})

    def _end(self, process: _Process, event: ConversationEnded | GroupGraded | None = None) -> None:
        process.end_turn()
        del self.alive[process.number]
        worker = [self.supervisor.worker.process] if self.supervisor.worker else []
        others = [other.process for other in self.alive.values()]
        process.end(self.supervisor.environment_processes | {*worker, *others})
        if isinstance(event, ConversationEnded) and not event.environment_seconds:
            # It was killed before it could report its time.
            event = replace(event, environment_seconds=process.seconds)
        if event is not None:
            self.trainer.put(event_data(event))
