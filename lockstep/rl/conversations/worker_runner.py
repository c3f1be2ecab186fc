"""The trainer's side of conversations in worker processes."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.rl.conversations.chat import Reply
from lockstep.rl.conversations.exchange import (
    ConversationEnded,
    ConversationRestarted,
    Event,
    GroupGraded,
    ReplyRequest,
    episode_data,
    event_from,
    reply_data,
)
from lockstep.rl.conversations.protocol import Episode
from lockstep.rl.environments.protocol import Example, Message
from lockstep.rl.grading.calling import KILLED, failure
from lockstep.rl.grading.frames import Closed
from lockstep.rl.grading.pool import CHECK_SECONDS, ENDED_SUPERVISOR, GraderPool, SupervisorProcess, fields_of
from lockstep.rl.grading.worker_supervisor import CONVERSE, DONE

SILENCE = 60.0
"""Seconds beyond the environment's time after which a silent supervisor is considered dead."""

Task = dict[str, Any]
"""Work for a process: `method`, `example`, `seed` and, for `grade`, `episodes`."""


def worker_task(example: Example, seed: int, episodes: Sequence[Episode] | None = None) -> Task:
    """A conversation about an example, or the grading of a group's `episodes`. Raises UserError as `fields_of`."""
    task: Task = {"method": "converse", "example": fields_of(example), "seed": seed}
    return task if episodes is None else task | {"method": "grade", "episodes": list(map(episode_data, episodes))}


@dataclass
class _Assignment:
    """A supervisor and its tasks."""

    supervisor: SupervisorProcess
    numbers: list[int] = field(default_factory=list)
    """Unfinished tasks."""
    started: list[int] = field(default_factory=list)
    """Tasks that have been started: all of them, or one at a time."""
    one_by_one: bool = False
    is_open: bool = False
    """Whether the supervisor runs conversations."""


class WorkerConversationRunner:
    """Conversations, or gradings of groups, by index, as in `ConversationRunner`. A context manager.

    If a supervisor dies, any of its tasks may be at fault: all are restarted, one by one, and the one that kills it
    again is.
    """

    def __init__(self, tasks: Sequence[Task], workers: GraderPool):
        self._tasks = tasks
        self._patience = workers.config.seconds + SILENCE
        self._on_progress = workers.on_progress
        self._assignments = [_Assignment(supervisor) for supervisor in workers.supervisors]
        self._events: deque[Event | ConversationRestarted] = deque()
        self._messages: dict[int, list[Message]] = {}
        """Of each conversation's last request, for those that are killed."""

    def __enter__(self) -> WorkerConversationRunner:
        for number in range(len(self._tasks)):
            self._assignment(number).numbers.append(number)
        for assignment in self._assignments:
            if assignment.numbers:
                assignment.supervisor.await_ready()
                self._start(assignment, assignment.numbers)
        return self

    def __exit__(self, *_: object) -> None:
        for assignment in self._assignments:
            if assignment.is_open:
                _end_tasks(assignment.supervisor)

    def next(self, wait: bool) -> Event | ConversationRestarted | None:
        """The next event of a conversation; None if there is none and `wait` is False."""
        # Silent checks are counted, as the clock runs on while this process itself is stopped.
        silent_checks = 0
        while not self._events:
            received = self._receive(CHECK_SECONDS if wait else 0.0)
            if not wait:
                break
            silent_checks = 0 if received else silent_checks + 1
            silent = silent_checks * CHECK_SECONDS > self._patience
            for assignment in self._assignments if silent_checks else ():
                # It is the environment's turn in all of them, or the trainer would not wait.
                if assignment.numbers and (assignment.supervisor.stays_stopped() or silent):
                    self._replace(assignment)
        return self._events.popleft() if self._events else None

    def answer(self, number: int, request: int, reply: Reply | None) -> None:
        """As `ConversationRunner.answer`."""
        with suppress(Closed):  # its end is noticed in `_receive`
            self._assignment(number).supervisor.send(["answer", number, request, reply_data(reply)])

    def _assignment(self, number: int) -> _Assignment:
        return self._assignments[number % len(self._assignments)]

    def _receive(self, seconds: float) -> bool:
        """Waits up to `seconds`; returns whether anything has arrived."""
        poll = select.poll()
        assignments = {a.supervisor.stream.reads: a for a in self._assignments if a.is_open}
        for end in assignments:
            poll.register(end, select.POLLIN)
        ready = poll.poll(1000 * seconds)
        for end, _ in ready:
            assignment = assignments[end]
            try:
                for data in assignment.supervisor.stream.messages():
                    self._handle(assignment, event_from(data))
            except (Closed, TypeError, ValueError, OverflowError):
                self._replace(assignment)
        return bool(ready)

    def _handle(self, assignment: _Assignment, event: Event) -> None:
        if event.number not in assignment.numbers:
            return
        self._on_progress()
        if isinstance(event, ReplyRequest):
            self._messages[event.number] = event.messages
        else:
            assignment.numbers.remove(event.number)
            if isinstance(event, ConversationEnded) and not event.messages:
                event = replace(event, messages=self._messages.get(event.number, []))
        self._events.append(event)
        if assignment.one_by_one and not isinstance(event, ReplyRequest):
            self._start(assignment, assignment.numbers[:1])

    def _replace(self, assignment: _Assignment) -> None:
        """Restarts a supervisor that has ended, or is stopped or silent, and its tasks."""
        assignment.supervisor.end()
        assignment.is_open = False
        if not assignment.numbers:
            return
        assignment.supervisor.await_ready()
        suspects = [number for number in assignment.started if number in assignment.numbers]
        if len(suspects) > 1:
            self._events.extend(ConversationRestarted(number) for number in suspects)
            assignment.one_by_one = True
            self._start(assignment, assignment.numbers[:1])
            return
        task = self._tasks[suspects[0]]
        problem = f"the {task['method']} of example {Example(**task['example']).name} {ENDED_SUPERVISOR}"
        self._handle(assignment, ConversationEnded(suspects[0], [], False, failure(KILLED, problem), {}))

    def _start(self, assignment: _Assignment, numbers: Sequence[int]) -> None:
        assignment.started = list(numbers)
        if not numbers:
            return
        start = [] if assignment.is_open else [CONVERSE]
        assignment.is_open = True
        with suppress(Closed):  # its end is noticed in `_receive`
            for message in [*start, *(["begin", number, self._tasks[number]] for number in numbers)]:
                assignment.supervisor.send(message)


def _end_tasks(supervisor: SupervisorProcess) -> None:
    """Ends a supervisor's unfinished tasks."""
    try:
        supervisor.send(DONE)
        while supervisor.receive(SILENCE) != DONE:
            pass
    except Closed:
        supervisor.end()


def run_tasks(tasks: Sequence[Task], workers: GraderPool) -> list[ConversationEnded | GroupGraded]:
    """The results of tasks that request no reply, in order."""
    results: dict[int, ConversationEnded | GroupGraded] = {}
    with WorkerConversationRunner(tasks, workers) as runner:
        while len(results) < len(tasks):
            if isinstance(event := runner.next(wait=True), ConversationEnded | GroupGraded):
                results[event.number] = event
    return [results[number] for number in range(len(tasks))]
