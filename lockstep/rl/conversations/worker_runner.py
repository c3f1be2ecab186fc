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
    Again,
    Asked,
    Ended,
    Graded,
    Said,
    episode_data,
    reply_data,
    said_of,
)
from lockstep.rl.conversations.protocol import Episode
from lockstep.rl.environments.protocol import Example, Message
from lockstep.rl.grading.calling import KILLED, failure
from lockstep.rl.grading.frames import Closed
from lockstep.rl.grading.pool import ENDED_SUPERVISOR, LOOK_SECONDS, SupervisorProcess, Workers, fields_of
from lockstep.rl.grading.worker_supervisor import CONVERSE, DONE

SILENCE = 60.0
"""Seconds beyond the environment's time after which a silent keeper is considered dead."""

Task = dict[str, Any]
"""What a process is to do: its `method`, `example`, `seed` and, for `grade`, `episodes`."""


def task_of(example: Example, seed: int, episodes: Sequence[Episode] | None = None) -> Task:
    """A conversation about an example, or the grading of a group's `episodes`. Raises UserError as `fields_of` does."""
    task: Task = {"method": "converse", "example": fields_of(example), "seed": seed}
    return task if episodes is None else task | {"method": "grade", "episodes": list(map(episode_data, episodes))}


@dataclass
class _Table:
    """A keeper and its tasks."""

    supervisor: SupervisorProcess
    numbers: list[int] = field(default_factory=list)
    """Of the unfinished tasks."""
    begun: list[int] = field(default_factory=list)
    """Tasks that have been started: all of them, or one at a time."""
    one_by_one: bool = False
    open: bool = False
    """Whether the keeper holds conversations."""


class WorkerConversationRunner:
    """Conversations, or gradings of groups, by index, as in `ConversationRunner`. A context manager.

    If a keeper dies, it is not known which of its tasks caused it. All of them are restarted, one by one, and one that
    brings it down again is at fault.
    """

    def __init__(self, tasks: Sequence[Task], workers: Workers):
        self._tasks = tasks
        self._patience = workers.supervisors[0].config.seconds + SILENCE
        self._moved = workers.moved
        self._tables = [_Table(supervisor) for supervisor in workers.supervisors]
        self._said: deque[Said | Again] = deque()
        self._messages: dict[int, list[Message]] = {}
        """What each requested last, for those that are killed before they send more."""

    def __enter__(self) -> WorkerConversationRunner:
        for number in range(len(self._tasks)):
            self._table(number).numbers.append(number)
        for table in self._tables:
            if table.numbers:
                table.supervisor.await_ready()
                self._begin(table, table.numbers)
        return self

    def __exit__(self, *_: object) -> None:
        for table in self._tables:
            if table.open:
                _leave(table.supervisor)

    def next(self, wait: bool) -> Said | Again | None:
        """The next message of a conversation; None if there is none and `wait` is False."""
        looks = 0  # without news; by the clock a keeper would count as silent while this process itself is stopped
        while not self._said:
            heard = self._listen(LOOK_SECONDS if wait else 0.0)
            if not wait:
                break
            looks = 0 if heard else looks + 1
            for table in self._tables if looks else ():
                # It is the environment's turn in all of them, or the trainer would not wait.
                if table.numbers and (table.supervisor.stays_stopped() or looks * LOOK_SECONDS > self._patience):
                    self._lose(table)
        return self._said.popleft() if self._said else None

    def answer(self, number: int, ask: int, reply: Reply | None) -> None:
        """Passes the model's reply to a conversation that has requested one; None: there will be no more."""
        with suppress(Closed):  # its end is noticed when listening to it
            self._table(number).supervisor.send(["answer", number, ask, reply_data(reply)])

    def _table(self, number: int) -> _Table:
        return self._tables[number % len(self._tables)]

    def _listen(self, seconds: float) -> bool:
        """Whether anything has arrived."""
        poll = select.poll()
        tables = {table.supervisor.stream.reads: table for table in self._tables if table.open}
        for end in tables:
            poll.register(end, select.POLLIN)
        heard = poll.poll(1000 * seconds)
        for end, _ in heard:
            table = tables[end]
            try:
                for data in table.supervisor.stream.messages():
                    self._hear(table, said_of(data))
            except (Closed, TypeError, ValueError, OverflowError):
                self._lose(table)
        return bool(heard)

    def _hear(self, table: _Table, said: Said) -> None:
        if said.number not in table.numbers:
            return
        self._moved()
        if isinstance(said, Asked):
            self._messages[said.number] = said.messages
        else:
            table.numbers.remove(said.number)
            if isinstance(said, Ended) and not said.messages:
                said = replace(said, messages=self._messages.get(said.number, []))
        self._said.append(said)
        if table.one_by_one and not isinstance(said, Asked):
            self._begin(table, table.numbers[:1])

    def _lose(self, table: _Table) -> None:
        """Handles a keeper that has ended, or is stopped or silent."""
        table.supervisor.end()
        table.open = False
        if not table.numbers:
            return
        table.supervisor.await_ready()
        suspects = [number for number in table.begun if number in table.numbers]
        if len(suspects) > 1:
            self._said.extend(Again(number) for number in suspects)
            table.one_by_one = True
            self._begin(table, table.numbers[:1])
            return
        task = self._tasks[suspects[0]]
        problem = f"the {task['method']} of example {Example(**task['example']).name} {ENDED_SUPERVISOR}"
        self._hear(table, Ended(suspects[0], [], False, failure(KILLED, problem), {}))

    def _begin(self, table: _Table, numbers: Sequence[int]) -> None:
        table.begun = list(numbers)
        if not numbers:
            return
        opening = [] if table.open else [CONVERSE]
        table.open = True
        with suppress(Closed):  # its end is noticed when listening to it
            for message in [*opening, *(["begin", number, self._tasks[number]] for number in numbers)]:
                table.supervisor.send(message)


def _leave(supervisor: SupervisorProcess) -> None:
    """Ends its unfinished tasks."""
    try:
        supervisor.send(DONE)
        while supervisor.receive(SILENCE) != DONE:
            pass
    except Closed:
        supervisor.end()


def hosted(tasks: Sequence[Task], workers: Workers) -> list[Ended | Graded]:
    """The results of tasks that request no reply, in order."""
    found: dict[int, Ended | Graded] = {}
    with WorkerConversationRunner(tasks, workers) as runner:
        while len(found) < len(tasks):
            if isinstance(said := runner.next(wait=True), Ended | Graded):
                found[said.number] = said
    return [found[number] for number in range(len(tasks))]
