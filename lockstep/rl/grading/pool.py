"""The trainer's side of the reward workers: their supervisor processes, and the division of jobs among them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config import RewardConfig
from lockstep.errors import UserError
from lockstep.rl.environments.loading import ADAPTERS, EnvironmentSource
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading.calling import KILLED, PATIENCE, Grader, Job, Outcome, failure, outcome_from
from lockstep.rl.grading.frames import Closed, PlainJob, Silent, Stream, chunk_of, receive, send
from lockstep.rl.grading.processes import end_marked, is_stopped
from lockstep.rl.grading.totals import InProcessGrader

CHUNK = 64
"""Maximum number of jobs per message; smaller towards the end, so that all workers finish at about the same time."""
QUICK_CHUNK, QUICK_SECONDS = 256, 0.05
"""Maximum number of jobs per message if they are expected to take no longer than this: each message wakes three
processes, which costs more than cheap rewards. Slow jobs within one message are not redistributed."""
MESSAGE_BYTES = 2**24
"""Larger messages are split: a message is read while the first job's time runs."""
SUPERVISOR = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lockstep.rl.conversations.supervisor_main import main; main()"
)
"""Code of a supervisor process, which uses the trainer's module search path."""
START_SECONDS = 600.0
"""Timeout for loading an environment, including its imports."""

CHECK_SECONDS = 1.0
"""Interval at which the trainer checks a silent supervisor, which a reward may have stopped."""
STOPPED_CHECKS = 3
"""Consecutive checks that must find a supervisor stopped before it is replaced. A cluster's scheduler that suspends and
resumes the whole job, this process first, stops it for fewer."""
END_SECONDS = 15.0
"""Timeout for a supervisor to end with all its descendants, before it is killed."""
ENDED_SUPERVISOR = "killed or stopped its worker's supervisor"


@contextmanager
def open_grader(
    environment: Environment,
    config: RewardConfig,
    source: EnvironmentSource | None,
    folder: Path,
    on_progress: Callable[[], None] = lambda: None,
) -> Iterator[Grader]:
    """Grades in workers or in this process, depending on `config.isolate`.

    source: how workers load the environment; None if the caller passed an object, which is graded in this process.
    on_progress: called, from any thread, whenever jobs have been graded. Raises UserError as `open_workers` does, and
    if an object would have to be isolated.
    """
    if source is None and config.isolate == "always":
        raise UserError(
            'rewards.isolate is "always", but the environment is given as an object, which other processes cannot '
            "recreate; put its class in a file and set environment = FILE.py:Class"
        )
    if source is None or config.isolate == "never" or (config.isolate == "auto" and not _isolates(environment, source)):
        yield InProcessGrader(environment, config, on_progress)
    else:
        with open_workers(source, config, folder, on_progress) as workers:
            yield workers


def _isolates(environment: Environment, source: EnvironmentSource) -> bool:
    """Whether `isolate = "auto"` means workers: for a FILE.py:Class, and for environments that ask for them."""
    package, colon, _ = source.name.partition(":")
    return (bool(colon) and package not in ADAPTERS) or environment.in_workers


def progress_timeout(grader: Grader) -> float:
    """Seconds that the trainer waits for rewards, or for a conversation's environment, without any progress."""
    if not isinstance(grader, GraderPool):
        return PATIENCE * grader.config.seconds
    return START_SECONDS + _chunk_timeout(grader.config, QUICK_CHUNK)


def _chunk_timeout(config: RewardConfig, jobs: int) -> float:
    """Seconds for a chunk: each job can use its time limit twice, once in a worker with others and once alone."""
    return 60.0 + 2 * jobs * (config.seconds + 2.0)


@contextmanager
def open_workers(
    source: EnvironmentSource, config: RewardConfig, folder: Path, on_progress: Callable[[], None] = lambda: None
) -> Iterator[GraderPool]:
    """Workers that load the environment from `source`; on exit they end with all their processes.

    They log to `folder/rewards_N.log`. Raises UserError if the environment cannot be loaded there.
    """
    count = config.workers or min(8, max(1, (os.cpu_count() or 1) // 2))
    with ExitStack() as opened:
        supervisors = [
            opened.enter_context(
                contextlib.closing(SupervisorProcess(source, config, folder / f"rewards_{number}.log"))
            )
            for number in range(count)
        ]
        yield GraderPool(supervisors, config, on_progress)


@dataclass(frozen=True)
class GraderPool:
    """A Grader: supervisor processes with a worker each, which also fork the processes of conversations."""

    supervisors: Sequence[SupervisorProcess]
    config: RewardConfig
    on_progress: Callable[[], None] = lambda: None
    """Called, from any thread, whenever results have arrived."""

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        return _grade(self.supervisors, jobs, self.on_progress)

    def awaited(self) -> str:
        """The workers that are grading, for messages: `reward worker 0, reward worker 2`."""
        return ", ".join(
            f"reward worker {number}{', which a signal has stopped' if supervisor.stopped else ''}"
            for number, supervisor in enumerate(self.supervisors)
            if supervisor.is_grading
        )


def _grade(
    supervisors: Sequence[SupervisorProcess], jobs: Sequence[Job], on_progress: Callable[[], None]
) -> list[Outcome]:
    """The outcome of each job, in order. One thread per supervisor takes chunks until none are left."""
    fields: dict[int, dict[str, Any]] = {}  # by identity: the completions of a group share their example
    for example, _ in jobs:
        if id(example) not in fields:
            fields[id(example)] = fields_of(example)
    outcomes: dict[int, Outcome] = {}
    waiting = deque(range(len(jobs)))
    errors: list[BaseException] = []
    lock = threading.Lock()
    quick = min(QUICK_CHUNK, -(-len(jobs) // len(supervisors)))

    def next_chunk(supervisor: SupervisorProcess) -> list[int]:
        with lock:
            size = min(CHUNK, -(-len(waiting) // len(supervisors)))
            if quick * supervisor.seconds_per_job <= QUICK_SECONDS:
                size = min(quick, len(waiting))
            return [waiting.popleft() for _ in range(size)]

    def drive(supervisor: SupervisorProcess) -> None:
        try:
            while chunk := next_chunk(supervisor):
                supervisor.is_grading = True
                plain_jobs = [(fields[id(jobs[index][0])], jobs[index][1]) for index in chunk]
                outcomes.update(zip(chunk, supervisor.grade(plain_jobs)))
                on_progress()
        except KeyboardInterrupt:  # from a signal, so in the main thread
            raise
        except BaseException as error:
            errors.append(error)
        finally:
            supervisor.is_grading = False

    threads = [threading.Thread(target=drive, args=(supervisor,), daemon=True) for supervisor in supervisors[1:]]
    for thread in threads:
        thread.start()
    try:
        drive(supervisors[0])
        for thread in threads:
            thread.join()
    finally:
        with lock:
            waiting.clear()  # after a signal, so that the other threads end
    if errors:
        raise errors[0]
    return [outcomes[index] for index in range(len(jobs))]


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
        """Of the last chunk."""
        self.stopped = 0
        """Number of consecutive checks that found it stopped."""
        self.closed = False
        self._ending = threading.Lock()
        """Both a thread that waits for results and the end of the run can end the process."""
        self.start()

    def grade(self, jobs: list[PlainJob]) -> list[Outcome]:
        """Grades jobs. If they kill the supervisor, they are graded again one by one, to find the one at fault."""
        message = json.dumps(chunk_of(jobs)).encode()
        if len(message) > MESSAGE_BYTES and len(jobs) > 1:
            half = len(jobs) // 2
            return self.grade(jobs[:half]) + self.grade(jobs[half:])
        try:
            return self._request(jobs, message)
        except Closed:
            self.start()
        if len(jobs) > 1:
            return [outcome for job in jobs for outcome in self.grade([job])]
        return [failure(KILLED, f"the reward of example {Example(**jobs[0][0]).name} {ENDED_SUPERVISOR}")]

    def _request(self, jobs: list[PlainJob], message: bytes) -> list[Outcome]:
        self.await_ready()
        began = time.monotonic()
        self.send(len(jobs), message)
        answers = self.receive(_chunk_timeout(self.config, len(jobs)))
        self.seconds_per_job = (time.monotonic() - began) / len(jobs)
        if not isinstance(answers, list) or len(answers) != len(jobs):
            raise Closed("not one outcome per job")
        return [outcome_from(answer) for answer in answers]

    def start(self) -> None:
        """Starts the process anew. Raises Closed after `close`, which a waiting thread may call this after."""
        self.end()
        if self.closed:
            raise Closed("the run ends")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, json.dumps([path or os.getcwd() for path in sys.path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                # Only the trainer receives Ctrl-C; it ends its workers.
                start_new_session=True,
                # One of several workers needs no threads, and OpenMP's do not survive its fork.
                env={**os.environ, "OMP_NUM_THREADS": "1", self.mark[0]: self.mark[1]},
            )
        assert self.process.stdin and self.process.stdout
        self.stream = Stream(self.process.stdout.fileno(), self.process.stdin.fileno())
        self.ready, self.stopped = False, 0
        self.send({"environment": asdict(self.source), "limits": asdict(self.config)})

    def send(self, *messages: Any) -> None:
        """Raises Closed if the process does not read them."""
        send(self.stream.writes, *messages)

    def receive(self, seconds: float) -> Any:
        """The next message. Raises Closed if there is none within `seconds`, or the supervisor stays stopped."""
        # Counts checks instead of reading the clock, which runs on while this process itself is stopped.
        for _ in range(math.ceil(seconds / CHECK_SECONDS)):
            with contextlib.suppress(Silent):
                return receive(self.stream.reads, self.stream.inbox, CHECK_SECONDS)
            if self.closed:
                raise Closed("the run ends")
            if self.stays_stopped():
                raise Closed("a signal has stopped it")
        raise Closed(f"no answer for {seconds:g} s")

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
            error = receive(self.stream.reads, self.stream.inbox, START_SECONDS)["error"]
        except Closed as closed:
            error = f"its process ended ({closed})"
        if error:
            raise UserError(
                f"{self.source.name} cannot be loaded in a reward worker: {error}. See {self.log}; "
                'rewards.isolate = "never" grades in the trainer\'s own process'
            )
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


def fields_of(example: Example) -> dict[str, Any]:
    """An example's fields as plain data. Raises UserError if its metadata is not plain data."""
    fields: dict[str, Any] = {"prompt": example.prompt, "answer": example.answer, "id": example.id}
    if example.chat_template_kwargs:
        fields["chat_template_kwargs"] = dict(example.chat_template_kwargs)
    if not example.metadata:
        return fields
    metadata = dict(example.metadata)
    try:
        plain = json.loads(json.dumps(metadata)) == metadata
    except (TypeError, ValueError, RecursionError):
        plain = False
    if not plain:
        raise UserError(
            f"the metadata of example {example.name} does not survive a round trip through JSON, so it cannot be sent "
            "to a reward worker; use strings, numbers, lists and dicts with string keys, or set "
            'rewards.isolate = "never"'
        )
    return {**fields, "metadata": metadata}
