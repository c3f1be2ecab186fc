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
                _grade(environment, config, number, body_of(order), started, supervisor)
            else:
                _run_conversation(environment, config, number, kind, body_of(order), supervisor)


def _grade(
    environment: Environment,
    config: RewardConfig,
    number: int,
    chunk: dict[str, Any],
    started: mmap.mmap,
    supervisor: Stream,
) -> None:
    """Grades the jobs of a chunk."""
    examples = [Example(**fields) for fields in chunk["examples"]]
    jobs = [(examples[index], completion) for index, completion in chunk["jobs"]]
    pid, interval = os.getpid(), 0.0 if is_async(environment) else BATCH_SECONDS
    batch, missing, sent = list[list[Any]](), len(jobs), time.monotonic()

    def report(index: int, outcome: Outcome) -> None:
        nonlocal missing, sent
        _require_process(pid)
        batch.append([index, outcome.rewards, outcome.cause, outcome.message])
        missing -= 1
        started[:] = STARTED.pack(index + 1)
        if not missing or time.monotonic() >= sent + interval:
            supervisor.send(message(REWARDED, number, not missing, body=to_json(batch)), seconds=None)
            batch.clear()
            sent = time.monotonic()

    call_rewards(environment, jobs, report, config.seconds, config.concurrent)


def _require_process(pid: int) -> None:
    """Ends this process if the environment has forked and this is the child; flushes output, to count for its job."""
    if os.getpid() != pid:
        os._exit(0)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


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
