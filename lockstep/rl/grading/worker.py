"""A process forked by its supervisor: grades chunks of jobs, or runs one conversation or one group's `grade`."""

from __future__ import annotations

import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lockstep.config import RewardConfig
from lockstep.rl.conversations.protocol import ConversationEnvironment, Episode
from lockstep.rl.conversations.runner import BlockedError, ConversationRunner, grade_groups
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading.calling import (
    INVALID,
    TIMEOUT,
    Outcome,
    call_problem,
    call_rewards,
    failure,
    is_async,
    outcome_of_error,
)
from lockstep.rl.grading.exchange import (
    GRADE,
    MAX_BYTES,
    REWARD,
    REWARDED,
    STARTED,
    ConversationEnded,
    Event,
    GroupGraded,
    ReplyRequest,
    body_of,
    event_message,
    header,
    message,
    reply_from,
)
from lockstep.workers import Closed, Stream, to_json
from lockstep.workers.processes import adopt_orphans, die_with_parent, limit_memory

BATCH_SECONDS = 0.02
"""Interval at which outcomes of plain functions are sent: one message each would cost more than a cheap reward."""
BATCH_BYTES = 2**16
"""Maximum size of a batch of outcomes, except for single ones."""


def run_tasks(environment: Environment, limits: dict[str, Any], started: mmap.mmap, pipe: int, output: int) -> None:
    """Runs tasks from `pipe`, with events and replies through it: chunks of jobs, or else one. Never returns.

    started: memory shared with the supervisor, for the index of the job that a plain function has started. output: of
    the environment.
    """
    os.setsid()  # a new process group, to be killed as one
    die_with_parent()
    adopt_orphans()  # so that they stay its descendants
    for stream in (1, 2):
        os.dup2(output, stream)
    limit_memory(int(limits["memory_gib"] * 2**30))
    supervisor, config = Stream(pipe, pipe), RewardConfig(**limits)
    with suppress(Closed):  # the supervisor is gone
        while True:
            order = supervisor.receive()
            _, number, kind, _ = header(order)
            if kind == REWARD:
                _Rewards(environment, config, number, started, supervisor).grade(body_of(order))
            else:
                _run_conversation(environment, config, number, kind, body_of(order), supervisor)


class _Rewards:
    """A chunk of jobs."""

    def __init__(
        self, environment: Environment, config: RewardConfig, number: int, started: mmap.mmap, supervisor: Stream
    ):
        self._environment, self._config, self._number = environment, config, number
        self._started, self._supervisor, self._pid = started, supervisor, os.getpid()
        self._interval = 0.0 if is_async(environment) else BATCH_SECONDS
        self._batch: list[list[Any]] = []
        self._bytes = 0
        self._sent = time.monotonic()

    def grade(self, chunk: dict[str, Any]) -> None:
        examples = [Example(**fields) for fields in chunk["examples"]]
        jobs = [(examples[index], completion) for index, completion in chunk["jobs"]]
        self._missing = len(jobs)
        call_rewards(self._environment, jobs, self._report, self._config.seconds, self._config.concurrent)

    def _report(self, index: int, outcome: Outcome) -> None:
        _require_process(self._pid)
        size = _max_bytes(outcome)
        if self._bytes and self._bytes + size > BATCH_BYTES:
            self._send()
        self._batch.append([index, outcome.rewards, outcome.cause, outcome.message])
        self._bytes += size
        self._missing -= 1
        self._started[:] = STARTED.pack(index + 1)
        if not self._missing or time.monotonic() >= self._sent + self._interval:
            self._send()

    def _send(self) -> None:
        batch = message(REWARDED, self._number, not self._missing, body=to_json(self._batch))
        self._batch, self._bytes = [], 0
        self._supervisor.send(batch, seconds=None)
        self._sent = time.monotonic()


def _require_process(pid: int) -> None:
    """Ends this process if the environment has forked and this is the child; flushes output, to count for its job."""
    if os.getpid() != pid:
        os._exit(0)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _max_bytes(outcome: Outcome) -> int:
    """An upper bound of its size as JSON, at twelve bytes per character; cheaper than encoding it."""
    rewards = outcome.rewards
    return 100 + 32 * len(rewards) + 12 * (len(outcome.message) + sum(map(len, rewards)))


def _run_conversation(
    environment: Environment, config: RewardConfig, number: int, kind: str, task: dict[str, Any], supervisor: Stream
) -> None:
    """Runs a conversation or a group's `grade`: `task` has the `example`, a `seed`, and a group's `episodes`."""
    assert isinstance(environment, ConversationEnvironment)
    pid, example = os.getpid(), Example(**task["example"])
    _seed(task["seed"])

    def emit(event: Event) -> None:
        _require_process(pid)
        data, is_last = event_message(event), not isinstance(event, ReplyRequest)
        if len(data) > MAX_BYTES:
            problem = call_problem(
                environment, example, f"sent a message of {len(data):,} bytes, more than {MAX_BYTES:,},", kind
            )
            data = event_message(ConversationEnded(number, [], False, failure(INVALID, problem), {}))
            is_last = True
        supervisor.send(data, seconds=None)
        if is_last:
            os._exit(0)

    try:
        if kind == GRADE:
            group = example, [Episode(**episode) for episode in task["episodes"]]
            emit(GroupGraded(number, *grade_groups(environment, [group], config, patience=1)))
        else:
            _converse(environment, example, config, number, supervisor, emit)
    except BlockedError as error:
        problem = call_problem(environment, example, "has not awaited anything for rewards.seconds", kind)
        emit(ConversationEnded(number, [], False, failure(TIMEOUT, f"{error.location}: {problem}"), {}))
    except MemoryError as error:
        emit(ConversationEnded(number, [], False, outcome_of_error(error, environment, example, kind), {}))


def _converse(
    environment: ConversationEnvironment,
    example: Example,
    config: RewardConfig,
    number: int,
    supervisor: Stream,
    emit: Callable[[Event], None],
) -> None:
    with ConversationRunner(environment, [example], config, patience=1) as runner:

        def receive_replies() -> None:
            try:
                while True:
                    request, reply = body_of(supervisor.receive())
                    runner.answer(0, request, reply_from(reply))
            except Closed:
                os._exit(0)  # the supervisor is gone

        threading.Thread(target=receive_replies, name="replies", daemon=True).start()
        while event := runner.next(wait=True):
            emit(replace(event, number=number))


def _seed(seed: int) -> None:
    """Seeds global generators, whose state all forks share otherwise; a restarted conversation draws the same."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
