"""A process that grades, forked by its supervisor, which has loaded the environment and enforces the limits."""

from __future__ import annotations

import mmap
import os
import resource
import struct
import sys
import time
from typing import Any

from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading.calling import Outcome, call_rewards, is_async
from lockstep.rl.grading.frames import encode, receive
from lockstep.rl.grading.processes import adopt_orphans, die_with_parent

STARTED = struct.Struct("<q")
ANSWER_SECONDS = 0.02
"""Interval at which outcomes of plain functions are sent: one message each would cost more than a cheap reward."""
MESSAGE_BYTES = 2**16
"""Maximum size of a batch of outcomes: the supervisor rejects longer messages, which a reward may have written."""


def work(
    environment: Environment, limits: dict[str, Any], started: mmap.mmap, requests: int, replies: int, output: int
) -> None:
    """Grades chunks from `requests` and writes outcomes to `replies`; never returns.

    `started` is memory shared with the supervisor: the index of the job that a plain function has started.
    """
    confine(limits, output)
    pid = os.getpid()

    batch, batch_bytes = list[list[Any]](), 0
    interval = 0.0 if is_async(environment) else ANSWER_SECONDS
    buffer = bytearray()
    while True:
        chunk = receive(requests, buffer)
        examples = [Example(**fields) for fields in chunk["examples"]]
        jobs = [(examples[index], completion) for index, completion in chunk["jobs"]]
        missing, last_sent = len(jobs), time.monotonic()

        def report(index: int, outcome: Outcome) -> None:
            nonlocal missing, last_sent, batch_bytes
            if os.getpid() != pid:
                os._exit(0)  # the reward forked, and this is the child
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # so that the output counts for this job
            size = _max_bytes(outcome)
            if batch and batch_bytes + size > MESSAGE_BYTES:
                _send(replies, batch)
                batch_bytes = 0
            batch.append([index, outcome.rewards, outcome.cause, outcome.message])
            batch_bytes += size
            missing -= 1
            started[:] = STARTED.pack(index + 1)
            if not missing or time.monotonic() >= last_sent + interval:
                _send(replies, batch)
                batch_bytes = 0
                last_sent = time.monotonic()

        started[:] = STARTED.pack(0)
        call_rewards(environment, jobs, report, limits["seconds"], limits["concurrent"])


def confine(limits: dict[str, Any], output: int) -> None:
    """Sets up a process forked from its supervisor: process group, limits, and output to `output`."""
    os.setsid()  # a new process group, to be killed as one
    die_with_parent()
    adopt_orphans()  # so that they stay its descendants
    for stream in (1, 2):
        os.dup2(output, stream)
    _limit_memory(int(limits["memory_gib"] * 2**30))


def _limit_memory(max_bytes: int) -> None:
    """Limits private writable memory (RLIMIT_DATA).

    RLIMIT_AS would also count libraries and reserved memory: several gigabytes if torch is imported.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _max_bytes(outcome: Outcome) -> int:
    """An upper bound of its size as JSON, at twelve bytes per character; cheaper than encoding it."""
    rewards = outcome.rewards
    return 100 + 32 * len(rewards) + 12 * (len(outcome.message) + sum(map(len, rewards)))


def _send(pipe: int, batch: list[list[Any]]) -> None:
    """Sends a batch as one message, and empties it."""
    left = memoryview(encode(batch))
    batch.clear()
    while left:
        left = left[os.write(pipe, left) :]
