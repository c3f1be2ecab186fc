"""The trainer's side of conversations in worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.rl.conversations.chat import Reply
from lockstep.rl.conversations.protocol import Episode
from lockstep.rl.environments.protocol import Example, Message
from lockstep.rl.grading.calling import KILLED, Outcome, failure
from lockstep.rl.grading.exchange import (
    ANSWER,
    CONVERSE,
    END,
    FAILED,
    GRADE,
    ConversationEnded,
    ConversationRestarted,
    Event,
    GroupGraded,
    ReplyRequest,
    body_of,
    event_from,
    fields_of,
    header,
    message,
)
from lockstep.rl.grading.pool import GraderPool
from lockstep.rl.grading.supervisor_process import ENDED_SUPERVISOR, SupervisorEvents, SupervisorProcess
from lockstep.workers import Closed, to_json


@dataclass(frozen=True)
class Task:
    """Work for a process: a conversation about an example, or the grading of a group's episodes."""

    kind: str
    name: str
    """Of the example."""
    body: dict[str, Any]


def worker_task(example: Example, seed: int, episodes: Sequence[Episode] | None = None) -> Task:
    """A conversation about an example, or the grading of a group's `episodes`. Raises UserError as `fields_of`."""
    body: dict[str, Any] = {"example": fields_of(example), "seed": seed}
    if episodes is None:
        return Task(CONVERSE, example.name, body)
    return Task(GRADE, example.name, body | {"episodes": list(map(asdict, episodes))})


@dataclass(eq=False)
class _Assignment:
    """A supervisor and its tasks."""

    supervisor: SupervisorProcess
    numbers: list[int] = field(default_factory=list)
    """Unfinished tasks, by their index."""
    started: dict[int, int] = field(default_factory=dict)
    """Indices of tasks that have been started, all of them or one at a time, by their number at the supervisor."""
    one_by_one: bool = False


class WorkerConversationRunner:
    """Conversations, or gradings of groups, by index, as in `ConversationRunner`. A context manager.

    If a supervisor dies, any of its tasks may be at fault: all are restarted, one by one, and the one that kills it
    again is.
    """

    def __init__(self, tasks: Sequence[Task], workers: GraderPool):
        self._tasks, self._workers = tasks, workers
        self._assignments = {supervisor: _Assignment(supervisor) for supervisor in workers.supervisors}
        self._by_index = [workers.supervisors[index % len(workers.supervisors)] for index in range(len(tasks))]
        self._arrivals = SupervisorEvents(workers.config)
        self._events: deque[Event | ConversationRestarted] = deque()
        self._messages: dict[int, list[Message]] = {}
        """Of each conversation's last request, for those that are killed."""

    def __enter__(self) -> WorkerConversationRunner:
        for index, supervisor in enumerate(self._by_index):
            self._assignments[supervisor].numbers.append(index)
        for assignment in self._assignments.values():
            if assignment.numbers:
                assignment.supervisor.await_ready()
                self._start(assignment, assignment.numbers)
        return self

    def __exit__(self, *_: object) -> None:
        for assignment in self._assignments.values():
            if assignment.started:
                assignment.supervisor.end_tasks()

    def next(self, wait: bool) -> Event | ConversationRestarted | None:
        """The next event of a conversation; None if there is none and `wait` is False."""
        while not self._events:
            busy = [one.supervisor for one in self._assignments.values() if one.numbers]
            # With `wait`, it is the environment's turn in all of them.
            for supervisor, data in self._arrivals.wait(busy, wait):
                if data is None:
                    self._replace(self._assignments[supervisor])
                else:
                    self._receive(self._assignments[supervisor], data)
            if not wait:
                break
        return self._events.popleft() if self._events else None

    def answer(self, index: int, request: int, reply: Reply | None) -> None:
        """As `ConversationRunner.answer`."""
        assignment = self._assignments[self._by_index[index]]
        number = next((number for number, started in assignment.started.items() if started == index), None)
        if number is not None:
            body = to_json([request, None if reply is None else asdict(reply)])
            assignment.supervisor.send(message(ANSWER, number, reply is None, body=body))

    def _receive(self, assignment: _Assignment, data: bytes) -> None:
        kind, number, _, seconds = header(data)
        index = assignment.started.get(number)
        if index is None or index not in assignment.numbers:
            return
        try:
            if kind == FAILED:
                cause, problem, _ = body_of(data)
                event: Event = ConversationEnded(index, [], False, self._failure(index, cause, problem), {})
            else:
                event = event_from(kind, index, body_of(data))
        except (Closed, TypeError, ValueError, OverflowError):  # the environment wrote into the pipe
            assignment.supervisor.send(message(END, number))
            event = ConversationEnded(index, [], False, self._failure(index, KILLED), {})
        if isinstance(event, ConversationEnded) and not event.environment_seconds:
            event = replace(event, environment_seconds=seconds)  # it was ended before it could report its time
        self._handle(assignment, event)

    def _failure(self, index: int, cause: str, problem: str = "") -> Outcome:
        task = self._tasks[index]
        return self._workers.problem(cause, task.name, task.kind, problem)

    def _handle(self, assignment: _Assignment, event: Event) -> None:
        self._workers.on_progress()
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
        assignment.supervisor.start()
        assignment.supervisor.await_ready()
        suspects = [index for index in assignment.started.values() if index in assignment.numbers]
        if len(suspects) > 1:
            self._events.extend(ConversationRestarted(index) for index in suspects)
            assignment.one_by_one = True
            self._start(assignment, assignment.numbers[:1])
            return
        for index in suspects:
            task = self._tasks[index]
            outcome = failure(KILLED, f"the {task.kind} of example {task.name} {ENDED_SUPERVISOR}")
            self._handle(assignment, ConversationEnded(index, [], False, outcome, {}))

    def _start(self, assignment: _Assignment, numbers: Sequence[int]) -> None:
        assignment.started = {
            assignment.supervisor.begin(self._tasks[index].kind, to_json(self._tasks[index].body)): index
            for index in numbers
        }


def run_tasks(tasks: Sequence[Task], workers: GraderPool) -> list[ConversationEnded | GroupGraded]:
    """The results of tasks that request no reply, in order."""
    results: dict[int, ConversationEnded | GroupGraded] = {}
    with WorkerConversationRunner(tasks, workers) as runner:
        while len(results) < len(tasks):
            if isinstance(event := runner.next(wait=True), ConversationEnded | GroupGraded):
                results[event.number] = event
    return [results[index] for index in range(len(tasks))]
