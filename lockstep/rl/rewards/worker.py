"""A process that grades: forked by its keeper, which has loaded the environment and ends it when it breaks a limit."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

from lockstep.rl.environment import Environment, Example
from lockstep.rl.processes import die_with_parent
from lockstep.rl.rewards.calling import Outcome, call_rewards
from lockstep.rl.rewards.frames import encode, receive


def work(environment: Environment, limits: dict[str, Any], requests: int, replies: int, output: int) -> None:
    """Grades what comes from `requests` and answers each job, as it is done, in `replies`. It never returns."""
    os.setsid()  # a group of its own, to be killed as one
    die_with_parent()
    for stream in (1, 2):
        os.dup2(output, stream)
    _limit_memory(int(limits["memory_gib"] * 2**30))
    own = os.getpid()

    def report(index: int, outcome: Outcome) -> None:
        if os.getpid() != own:
            os._exit(0)  # a reward forked and returned twice: this is not the process that was asked
        for printed in (sys.stdout, sys.stderr):
            printed.flush()  # so that what this reward printed arrives before its answer
        _write(replies, encode([index, outcome.rewards, outcome.cause, outcome.message]))

    buffer = bytearray()
    while True:
        jobs = [(Example(**example), completion) for example, completion in receive(requests, buffer)]
        call_rewards(environment, jobs, report, limits["seconds"], limits["concurrent"])


def _limit_memory(most_bytes: int) -> None:
    """Of what this process writes itself: RLIMIT_DATA counts private memory.

    RLIMIT_AS would count libraries and what is merely reserved: several gigabytes where torch is imported.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _write(pipe: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(pipe, left) :]
