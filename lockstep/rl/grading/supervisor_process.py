"""The trainer's side of a worker supervisor: its process, and what waits for its messages."""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import select
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep.config import RewardConfig
from lockstep.errors import UserError
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.grading.exchange import BEGIN, DONE, END_ALL, header, message
from lockstep.workers import Closed, from_json, start_python, to_json
from lockstep.workers.processes import end_marked, is_stopped

SUPERVISOR = "from lockstep.rl.grading.supervisor import main; main()"
START_SECONDS = 600.0
"""Timeout for loading an environment, including its imports."""
SILENCE = 60.0
"""Seconds beyond rewards.seconds after which a supervisor that sends nothing is considered dead."""
CHECK_SECONDS = 1.0
"""Interval at which the trainer checks supervisors, which a reward may have stopped."""
STOPPED_CHECKS = 3
"""Consecutive checks that must find a supervisor stopped before it is replaced. A cluster's scheduler that suspends and
resumes the whole job, this process first, stops it for fewer."""
END_SECONDS = 15.0
"""Timeout for a supervisor to end with all its descendants, before it is killed."""
ENDED_SUPERVISOR = "killed or stopped its worker's supervisor"


class SupervisorProcess:
    """A supervisor process, restarted if a reward has killed it."""

    def __init__(self, source: EnvironmentSource, config: RewardConfig, log: Path):
        self.source, self.config, self.log = source, config, log
        # An environment variable that its descendants inherit, to find them after the supervisor has died.
        self.mark = "LOCKSTEP_SUPERVISOR", secrets.token_hex()
        self.process: subprocess.Popen[bytes] | None = None
        self.is_grading = False
        """Whether the trainer waits for its results; read by another thread."""
        self.seconds_per_job = math.inf
        """Of its last chunk of rewards."""
        self.environment_name, self.is_async = "", False
        """Of the environment's class, and whether its rewards are coroutines; known once it is ready."""
        self.has_graded = self.needs_fresh = False
        """Whether its worker for rewards has graded before, and must be replaced before it grades again."""
        self._numbers = itertools.count()
        """Of tasks: late messages about an earlier one are not taken for those of another."""
        self.stopped = 0
        """Number of consecutive checks that found it stopped."""
        self.closed = False
        self._ending = threading.Lock()
        """Both a thread that waits for results and the end of the run can end the process."""
        self.start()

    def start(self) -> None:
        """Starts the process anew. Raises Closed after `close`, which a waiting thread may call this after."""
        self.end()
        if self.closed:
            raise Closed("the run ends")
        with self.log.open("ab") as log:
            # One of several workers needs no threads, and OpenMP's do not survive its fork.
            environment = {"OMP_NUM_THREADS": "1", self.mark[0]: self.mark[1]}
            self.process, self.stream = start_python(SUPERVISOR, log, environment, working_folder=True)
        self.ready, self.stopped = False, 0
        self.has_graded = self.needs_fresh = False
        self.send(to_json({"environment": asdict(self.source), "limits": asdict(self.config)}))

    def begin(self, kind: str, body: bytes, fresh: bool = False) -> int:
        """Sends a task; returns its number. fresh: rewards in a new worker."""
        number = next(self._numbers)
        self.send(message(BEGIN, number, kind, fresh, body=body))
        return number

    def send(self, data: bytes) -> None:
        """Sends an order without blocking. If the process does not read it, `SupervisorEvents` notices its end."""
        if self.process is not None:  # else its descriptors may be those of something else
            with contextlib.suppress(Closed):
                self.stream.put(data)

    def end_tasks(self) -> None:
        """Ends all its tasks."""
        self.send(message(END_ALL))
        events = SupervisorEvents(self.config)
        while self.process is not None:
            for _, data in events.wait([self]):
                if data is None:
                    self.end()
                elif header(data) == [DONE]:
                    return

    def stays_stopped(self) -> bool:
        """Whether the last STOPPED_CHECKS calls, at intervals of CHECK_SECONDS, found the process stopped."""
        process = self.process
        self.stopped = self.stopped + 1 if process and is_stopped(process.pid) else 0
        return self.stopped >= STOPPED_CHECKS

    def await_ready(self) -> None:
        """Waits for the environment; restarts the process if it has ended. Raises UserError if loading fails."""
        if self.process is None:
            self.start()
        if self.ready:
            return
        try:
            # Without checks for a stopped process: replacing it here would end the run.
            about = from_json(self.stream.receive(START_SECONDS))
        except Closed as closed:
            about = {"error": f"its process ended ({closed})"}
        if about["error"]:
            raise UserError(
                f"{self.source.name} cannot be loaded in a reward worker: {about['error']}. See {self.log}; "
                'rewards.isolate = "never" grades in the trainer\'s own process'
            )
        self.environment_name, self.is_async = about["name"], about["is_async"]
        self.ready = True

    def close(self) -> None:
        """Ends the process permanently."""
        self.closed = True
        self.end()

    def end(self) -> None:
        """Ends the process, which kills its worker and all processes that the worker has started."""
        with self._ending:
            self._end()

    def _end(self) -> None:
        if self.process is None:
            return
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        if is_stopped(self.process.pid):
            self.process.kill()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        if self.process.returncode:
            end_marked("=".join(self.mark))  # no clean exit, so descendants may be left
        self.process = None
        with contextlib.suppress(FileNotFoundError):  # already deleted
            if not self.log.stat().st_size:
                self.log.unlink()


class SupervisorEvents:
    """Waits for the messages of some supervisors, and notices those that have ended, are stopped or silent."""

    def __init__(self, config: RewardConfig):
        self._silence = config.seconds + SILENCE
        # Checks are counted, as the clock runs on while this process itself is stopped.
        self._checked = time.monotonic()
        self._silent_checks = 0

    def wait(
        self, supervisors: Sequence[SupervisorProcess], wait: bool = True
    ) -> Iterator[tuple[SupervisorProcess, bytes | None]]:
        """Messages that have arrived, by supervisor; None for one that must be replaced.

        Waits up to CHECK_SECONDS for the first. With `wait`, it must be their turn: those that then say nothing for
        longer than their workers may take are taken to be dead.
        """
        poll = select.poll()
        for supervisor in supervisors:
            for end, event in supervisor.stream.events().items():
                poll.register(end, event)
        ready = {end for end, _ in poll.poll(1000 * CHECK_SECONDS if wait else 0)}
        for supervisor in supervisors:
            try:
                supervisor.stream.flush()
                for data in supervisor.stream.received() if supervisor.stream.reads in ready else ():
                    yield supervisor, data
            except Closed:
                yield supervisor, None
        self._silent_checks = 0 if ready else self._silent_checks
        if not wait or time.monotonic() < self._checked + CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        self._silent_checks += not ready
        is_silent = self._silent_checks * CHECK_SECONDS > self._silence
        if is_silent:
            self._silent_checks = 0  # those that replace them have their time again
        for supervisor in supervisors:
            if supervisor.stream.reads not in ready and (supervisor.stays_stopped() or is_silent):
                yield supervisor, None
