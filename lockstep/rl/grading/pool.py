"""Grades completions in this process or in workers: divides jobs among them, and finds the one at fault."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import RewardConfig
from lockstep.errors import UserError
from lockstep.rl.environments.loading import ADAPTERS, EnvironmentSource
from lockstep.rl.environments.protocol import Environment
from lockstep.rl.grading.calling import (
    KILLED,
    MEMORY,
    OUTPUT,
    PATIENCE,
    PROCESSES,
    TIMEOUT,
    Grader,
    Job,
    Outcome,
    failure,
    outcome_from,
)
from lockstep.rl.grading.exchange import FAILED, REWARD, body_of, fields_of, header
from lockstep.rl.grading.supervisor_process import (
    ENDED_SUPERVISOR,
    SILENCE,
    START_SECONDS,
    SupervisorEvents,
    SupervisorProcess,
)
from lockstep.rl.grading.totals import InProcessGrader
from lockstep.workers import Closed, to_json

CHUNK = 64
"""Maximum number of jobs per message; smaller towards the end, so that all workers finish at about the same time.
Coroutines of a message run together: if their worker dies, any could be the cause, and each is graded again alone."""
QUICK_CHUNK, QUICK_SECONDS = 256, 0.05
"""Maximum number of jobs per message if they are expected to take no longer than this: each message wakes three
processes, which costs more than cheap rewards. Slow jobs within one message are not redistributed."""
MESSAGE_BYTES = 2**24
"""Larger messages are split: a message is read while the first job's time runs."""


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
    return START_SECONDS + 2 * (SILENCE + grader.config.seconds)


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
    """A Grader: supervisor processes, which fork workers for rewards and for conversations."""

    supervisors: Sequence[SupervisorProcess]
    config: RewardConfig
    on_progress: Callable[[], None] = lambda: None
    """Called, from any thread, whenever results have arrived."""

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        return _Grading(self, jobs).run()

    def awaited(self) -> str:
        """The workers that are grading, for messages: `reward worker 0, reward worker 2`."""
        return ", ".join(
            f"reward worker {number}{', which a signal has stopped' if supervisor.stopped else ''}"
            for number, supervisor in enumerate(self.supervisors)
            if supervisor.is_grading
        )

    def problem(self, cause: str, example: str, method: str, problem: str = "") -> Outcome:
        """The failure of a call of `method` for an example, which a supervisor has ended for a cause, or a problem."""
        config = self.config
        reasons = {
            TIMEOUT: f"took longer than rewards.seconds {config.seconds:g}",
            MEMORY: f"needed more than rewards.memory_gib {config.memory_gib:g}",
            KILLED: "ended its worker process",
            PROCESSES: f"started more than rewards.processes {config.processes}",
            OUTPUT: f"printed more than rewards.output_kib {config.output_kib}",
        }
        cause = cause if cause in reasons else KILLED
        name = self.supervisors[0].environment_name
        return failure(cause, f"{name}.{method} {problem or reasons[cause]} for example {example}")


@dataclass
class _Chunk:
    """Jobs that a supervisor grades."""

    number: int
    """Of the task."""
    jobs: list[int]
    is_fresh: bool
    """Whether its worker has graded nothing before."""
    began: float


class _Grading:
    """Grades jobs on all supervisors, a chunk at a time on each.

    The job that a worker had started when it was ended is at fault, unless earlier jobs may have left something behind
    (memory, threads, processes): then it is graded again, alone in a new worker, before it is blamed. If a supervisor
    dies, so is every job that it had, and the one that kills it again is at fault.
    """

    def __init__(self, pool: GraderPool, jobs: Sequence[Job]):
        self._pool, self._jobs = pool, jobs
        # By identity: the completions of a group share their example.
        examples = {id(example): example for example, _ in jobs}
        self._examples = {key: fields_of(example) for key, example in examples.items()}
        self._outcomes: dict[int, Outcome] = {}
        self._waiting, self._suspects = deque(range(len(jobs))), deque[int]()
        self._chunks: dict[SupervisorProcess, _Chunk] = {}

    def run(self) -> list[Outcome]:
        """The outcome of each job, in order."""
        events = SupervisorEvents(self._pool.config)
        try:
            while len(self._outcomes) < len(self._jobs):
                for supervisor in self._pool.supervisors:
                    if supervisor not in self._chunks:
                        self._begin(supervisor)
                for supervisor, data in events.wait(list(self._chunks)):
                    if data is None:
                        self._replace(supervisor)
                    elif supervisor in self._chunks:
                        self._handle(supervisor, self._chunks[supervisor], data)
        finally:
            for supervisor in self._pool.supervisors:
                supervisor.is_grading = False
        return [self._outcomes[index] for index in range(len(self._jobs))]

    def _begin(self, supervisor: SupervisorProcess) -> None:
        """Sends the next chunk, if there is one."""
        if not self._suspects and not self._waiting:
            return
        supervisor.await_ready()
        alone = bool(self._suspects)
        jobs = [self._suspects.popleft()] if alone else self._next_jobs(supervisor)
        body = self._body(jobs)
        while len(body) > MESSAGE_BYTES and len(jobs) > 1:
            half = len(jobs) // 2
            self._waiting.extendleft(reversed(jobs[half:]))
            jobs = jobs[:half]
            body = self._body(jobs)
        is_fresh = alone or supervisor.needs_fresh or not supervisor.has_graded
        number = supervisor.begin(REWARD, body, is_fresh)
        supervisor.needs_fresh, supervisor.has_graded, supervisor.is_grading = False, True, True
        self._chunks[supervisor] = _Chunk(number, jobs, is_fresh, time.monotonic())

    def _next_jobs(self, supervisor: SupervisorProcess) -> list[int]:
        workers = len(self._pool.supervisors)
        size = min(CHUNK, -(-len(self._waiting) // workers))
        quick = min(QUICK_CHUNK, -(-len(self._jobs) // workers))
        if not supervisor.is_async and quick * supervisor.seconds_per_job <= QUICK_SECONDS:
            size = min(quick, len(self._waiting))
        return [self._waiting.popleft() for _ in range(size)]

    def _body(self, jobs: Sequence[int]) -> bytes:
        """Jobs as a task, in which several completions share one copy of their example."""
        keys = list(dict.fromkeys(id(self._jobs[index][0]) for index in jobs))
        places = {key: place for place, key in enumerate(keys)}
        examples = [self._examples[key] for key in keys]
        pairs = [[places[id(self._jobs[index][0])], self._jobs[index][1]] for index in jobs]
        return to_json({"examples": examples, "jobs": pairs})

    def _handle(self, supervisor: SupervisorProcess, chunk: _Chunk, data: bytes) -> None:
        """Records the outcomes in a message, or a chunk's end."""
        kind, number, is_last, _ = header(data)
        if number != chunk.number:
            return  # of a call that was interrupted
        self._pool.on_progress()
        if kind == FAILED:
            cause, problem, current = body_of(data)
            self._fail(supervisor, cause, min(max(current, 0), len(chunk.jobs) - 1), problem)
            return
        try:
            for place, *answer in body_of(data):
                index = chunk.jobs[place]
                if index in self._outcomes or place < 0:
                    raise ValueError(f"job {place} was already answered")
                outcome = outcome_from(answer)
                if outcome.cause == MEMORY:
                    self._fail(supervisor, MEMORY, place)
                    return
                self._outcomes[index] = outcome
        except (Closed, LookupError, TypeError, ValueError):
            is_last = True  # a reward wrote into its worker's pipes
        if not is_last:
            return
        unanswered = [place for place, index in enumerate(chunk.jobs) if index not in self._outcomes]
        if unanswered:
            self._fail(supervisor, KILLED, unanswered[0])
            return
        supervisor.seconds_per_job = (time.monotonic() - chunk.began) / len(chunk.jobs)
        self._end(supervisor)

    def _end(self, supervisor: SupervisorProcess) -> _Chunk:
        supervisor.is_grading = False
        return self._chunks.pop(supervisor)

    def _fail(self, supervisor: SupervisorProcess, cause: str, current: int, problem: str = "") -> None:
        """Blames the job at fault, or suspects it; the others that have no outcome wait again."""
        chunk = self._end(supervisor)
        supervisor.needs_fresh = True
        unanswered = [index for index in chunk.jobs if index not in self._outcomes]
        # Any coroutine that has not answered may be at fault.
        started = unanswered if supervisor.is_async else [i for i in unanswered if i == chunk.jobs[current]]
        self._waiting.extendleft(reversed([index for index in unanswered if index not in started]))
        is_first = chunk.is_fresh and started == chunk.jobs[:1]
        if started and (is_first or (cause == TIMEOUT and not supervisor.is_async)):
            self._outcomes[started[0]] = self._pool.problem(cause, self._name(started[0]), REWARD, problem)
        else:
            self._suspects.extend(started)

    def _replace(self, supervisor: SupervisorProcess) -> None:
        """Restarts a supervisor that has ended, or is stopped or silent."""
        supervisor.start()
        jobs = self._end(supervisor).jobs if supervisor in self._chunks else []
        if len(jobs) == 1:
            message = f"the reward of example {self._name(jobs[0])} {ENDED_SUPERVISOR}"
            self._outcomes[jobs[0]] = failure(KILLED, message)
        else:
            self._suspects.extend(index for index in jobs if index not in self._outcomes)

    def _name(self, index: int) -> str:
        return self._jobs[index][0].name
