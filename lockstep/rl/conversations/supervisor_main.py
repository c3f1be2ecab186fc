"""Entry point of a worker supervisor's process, started by `grading/pool.py`: grades, and runs conversations."""

from __future__ import annotations

import contextlib
import os

from lockstep.rl.conversations.worker_processes import supervise_conversations
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.grading.calling import error_text
from lockstep.rl.grading.frames import Closed, receive, receive_body, send
from lockstep.rl.grading.processes import adopt_orphans
from lockstep.rl.grading.worker_supervisor import CONVERSE, WorkerSupervisor


def main() -> None:
    """Reads orders from standard input until it closes, and writes answers to standard output.

    An order is CONVERSE, or the number of jobs in the chunk that follows.
    """
    orders, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # output of the environment while it is loaded goes to the log
    os.set_blocking(answers, False)
    adopt_orphans()
    buffer = bytearray()
    with contextlib.suppress(Closed):
        start = receive(orders, buffer)
        try:
            environment = load_environment(**start["environment"])
        except BaseException as error:
            send(answers, {"error": error_text(error)})
            return
        send(answers, {"error": ""})
        supervisor = WorkerSupervisor(environment, start["limits"], orders, answers)
        try:
            while True:
                order = receive(orders, buffer)
                if order == CONVERSE:
                    supervise_conversations(supervisor, buffer)
                else:
                    send(answers, supervisor.grade(order, receive_body(orders, buffer)))
        finally:
            supervisor.end_worker()
