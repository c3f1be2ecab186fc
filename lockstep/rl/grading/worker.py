"""A process that grades: forked by its keeper, which has loaded the environment and kills it if it exceeds a limit."""

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

BEGUN = struct.Struct("<q")
ANSWER_SECONDS = 0.02
"""How long answers of plain functions are batched: a message for each would cost more than a cheap reward."""
MESSAGE_BYTES = 2**16
"""Most bytes of several answers in one message: the keeper takes a long one for something that a reward wrote."""


def work(
    environment: Environment, limits: dict[str, Any], begun: mmap.mmap, requests: int, replies: int, output: int
) -> None:
    """Grades what arrives in `requests` and answers in `replies`; never returns.

    `begun` is shared with the keeper and holds the index of the job that a plain function has started.
    """
    confine(limits, output)
    own = os.getpid()

    answers, held = list[list[Any]](), 0
    wait = 0.0 if is_async(environment) else ANSWER_SECONDS
    buffer = bytearray()
    while True:
        chunk = receive(requests, buffer)
        examples = [Example(**fields) for fields in chunk["examples"]]
        jobs = [(examples[place], completion) for place, completion in chunk["jobs"]]
        missing, last = len(jobs), time.monotonic()

        def report(index: int, outcome: Outcome) -> None:
            nonlocal missing, last, held
            if os.getpid() != own:
                os._exit(0)  # a reward forked and returned twice: this is not the original process
            for printed in (sys.stdout, sys.stderr):
                printed.flush()  # while this job still counts as the current one
            size = _most_bytes(outcome)
            if answers and held + size > MESSAGE_BYTES:
                _send(replies, answers)
                held = 0
            answers.append([index, outcome.rewards, outcome.cause, outcome.message])
            held += size
            missing -= 1
            begun[:] = BEGUN.pack(index + 1)
            if not missing or time.monotonic() >= last + wait:
                _send(replies, answers)
                held = 0
                last = time.monotonic()

        begun[:] = BEGUN.pack(0)
        call_rewards(environment, jobs, report, limits["seconds"], limits["concurrent"])


def confine(limits: dict[str, Any], output: int) -> None:
    """First steps of a process forked from its keeper; what it prints goes to `output`."""
    os.setsid()  # its own group, to be killed as one
    die_with_parent()
    adopt_orphans()  # so that they are known to be its own
    for stream in (1, 2):
        os.dup2(output, stream)
    _limit_memory(int(limits["memory_gib"] * 2**30))


def _limit_memory(most_bytes: int) -> None:
    """Limits memory that this process writes itself: RLIMIT_DATA counts private memory.

    RLIMIT_AS would also count libraries and reserved memory: several gigabytes if torch is imported.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _most_bytes(outcome: Outcome) -> int:
    """More than its answer has as JSON, in which a character can take twelve bytes; encoding each would cost more."""
    rewards = outcome.rewards
    return 100 + 32 * len(rewards) + 12 * (len(outcome.message) + sum(map(len, rewards)))


def _send(pipe: int, answers: list[list[Any]]) -> None:
    """Sends all answers as one message, and removes them."""
    left = memoryview(encode(answers))
    answers.clear()
    while left:
        left = left[os.write(pipe, left) :]
