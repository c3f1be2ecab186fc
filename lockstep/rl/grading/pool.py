"""The trainer's side of the reward workers: a keeper process for each, and jobs divided among them."""

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

from lockstep.config import RewardConfig, RLConfig
from lockstep.errors import UserError
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.environments.ready import ADAPTERS
from lockstep.rl.grading.calling import KILLED, PATIENCE, Grader, Job, Outcome, failure, outcome_from
from lockstep.rl.grading.frames import Closed, PlainJob, Silent, Stream, chunk_of, receive, send
from lockstep.rl.grading.processes import end_marked, is_stopped
from lockstep.rl.grading.totals import grade_here

CHUNK = 64
"""Most jobs per message to a worker; fewer towards the end, so that all workers finish at about the same time."""
QUICK_CHUNK, QUICK_SECONDS = 256, 0.05
"""Most jobs per message if they should take no longer than this: each message wakes three processes, which costs more
than cheap rewards. What becomes slow within one is not shared with other workers."""
MESSAGE_BYTES = 2**24
"""Size from which jobs are sent in several messages: it is read while the first job's time runs."""
SUPERVISOR = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lockstep.rl.conversations.supervisor_main import main; main()"
)
"""What a keeper runs: it has the trainer's module search path."""
START_SECONDS = 600.0
"""Timeout for importing an environment, with all that it imports itself."""

LOOK_SECONDS = 1.0
"""Interval at which the trainer checks a silent keeper: a reward may have stopped it."""
STOPPED_LOOKS = 3
"""Checks in a row that must find a keeper stopped before it is given up. A job that suspends all its processes and
resumes them, this one first, stops it for less."""
END_SECONDS = 15.0
"""How long a keeper may take to end itself and all its descendants before it is killed."""
ENDED_SUPERVISOR = "killed or stopped the workers' keeper"
"""What the user is told about it."""


@contextmanager
def open_grader(
    config: RLConfig, environment: Environment, is_given: bool, folder: Path, moved: Callable[[], None] = lambda: None
) -> Iterator[Grader]:
    """Workers, or this process, as `config.rewards` says; an environment given as an object (`is_given`) stays here.

    `moved` is called, from any thread, whenever some are graded.

    Raises UserError as `open_workers` does, and if an object would have to be isolated.
    """
    isolate = config.rewards.isolate
    if is_given and isolate == "always":
        raise UserError(
            'rewards.isolate is "always", but the environment is given as an object, which other processes cannot '
            "recreate; put its class in a file and set environment = FILE.py:Class"
        )
    package, colon, _ = config.environment.partition(":")
    of_a_file = bool(colon) and package not in ADAPTERS
    if is_given or isolate == "never" or (isolate == "auto" and not (of_a_file or environment.in_workers)):
        yield lambda jobs: grade_here(environment, jobs, config.rewards.seconds, config.rewards.concurrent, moved)
    else:
        with open_workers(config, folder, moved) as grader:
            yield grader


def own_limit(config: RewardConfig, grader: Grader) -> float:
    """Seconds that the trainer may wait for rewards, or for a conversation's environment, without any progress."""
    if not isinstance(grader, Workers):
        return PATIENCE * config.seconds
    return START_SECONDS + _patience(config, QUICK_CHUNK)


def _patience(config: RewardConfig, jobs: int) -> float:
    """Seconds for a chunk: each job can use its time limit twice, once in a worker with others and once alone."""
    return 60.0 + 2 * jobs * (config.seconds + 2.0)


@contextmanager
def open_workers(config: RLConfig, folder: Path, moved: Callable[[], None] = lambda: None) -> Iterator[Workers]:
    """Workers for the environment that `config` names; on exit they are ended with all their processes.

    They log to `folder/rewards_N.log`. Raises UserError if the environment cannot be loaded there.
    """
    rewards = config.rewards
    count = rewards.workers or min(8, max(1, (os.cpu_count() or 1) // 2))
    environment = {"name": config.environment, "data": config.data, "skip_bad_lines": config.skip_bad_lines}
    with ExitStack() as opened:
        supervisors = [
            opened.enter_context(
                contextlib.closing(SupervisorProcess(environment, rewards, folder / f"rewards_{number}.log"))
            )
            for number in range(count)
        ]
        yield Workers(supervisors, moved)


@dataclass(frozen=True)
class Workers:
    """Keepers, each with its worker. A Grader; conversations run in processes of the same keepers."""

    supervisors: Sequence[SupervisorProcess]
    moved: Callable[[], None] = lambda: None
    """Called, from any thread, whenever something has arrived from them."""

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        return _grade(self.supervisors, jobs, self.moved)

    def awaited(self) -> str:
        """Those that are currently grading: `reward worker 0, reward worker 2`."""
        return ", ".join(
            f"reward worker {number}{', which a signal has stopped' if supervisor.stopped else ''}"
            for number, supervisor in enumerate(self.supervisors)
            if supervisor.grades
        )


def _grade(supervisors: Sequence[SupervisorProcess], jobs: Sequence[Job], moved: Callable[[], None]) -> list[Outcome]:
    """Every job's outcome, in order. One thread per keeper takes chunks until none are left."""
    plain: dict[int, dict[str, Any]] = {}  # by identity: the completions of a group share their example
    for example, _ in jobs:
        if id(example) not in plain:
            plain[id(example)] = fields_of(example)
    outcomes: dict[int, Outcome] = {}
    waiting = deque(range(len(jobs)))
    errors: list[BaseException] = []
    lock = threading.Lock()
    quick = min(QUICK_CHUNK, -(-len(jobs) // len(supervisors)))

    def chunk(supervisor: SupervisorProcess) -> list[int]:
        with lock:
            size = min(CHUNK, -(-len(waiting) // len(supervisors)))
            if quick * supervisor.seconds_a_job <= QUICK_SECONDS:
                size = min(quick, len(waiting))
            return [waiting.popleft() for _ in range(size)]

    def drive(supervisor: SupervisorProcess) -> None:
        try:
            while taken := chunk(supervisor):
                supervisor.grades = True
                asked = [(plain[id(jobs[index][0])], jobs[index][1]) for index in taken]
                outcomes.update(zip(taken, supervisor.grade(asked)))
                moved()
        except KeyboardInterrupt:  # a signal, and so in the main thread
            raise
        except BaseException as error:
            errors.append(error)
        finally:
            supervisor.grades = False

    threads = [threading.Thread(target=drive, args=(supervisor,), daemon=True) for supervisor in supervisors[1:]]
    for thread in threads:
        thread.start()
    try:
        drive(supervisors[0])
        for thread in threads:
            thread.join()
    finally:
        with lock:
            waiting.clear()  # after a signal, the other threads take no more
    if errors:
        raise errors[0]
    return [outcomes[index] for index in range(len(jobs))]


class SupervisorProcess:
    """A keeper process, restarted if a reward has killed it."""

    def __init__(self, environment: dict[str, Any], config: RewardConfig, log: Path):
        self.environment, self.config, self.log = environment, config, log
        # Its descendants inherit this, and can be found by it when the keeper is gone.
        self.mark = "LOCKSTEP_SUPERVISOR", secrets.token_hex()
        self.process: subprocess.Popen[bytes] | None = None
        self.grades = False
        """Whether the trainer waits for its answers; read by another thread."""
        self.seconds_a_job = math.inf
        """How long its last answers took."""
        self.stopped = 0
        """Checks in a row that have found it stopped."""
        self.closed = False
        self._ending = threading.Lock()
        """Both a thread that waits for an answer and the end of the run can end a keeper."""
        self.start()

    def grade(self, jobs: list[PlainJob]) -> list[Outcome]:
        """Outcomes of jobs. If they bring the keeper down, they are graded again one by one, to find the culprit."""
        message = json.dumps(chunk_of(jobs)).encode()
        if len(message) > MESSAGE_BYTES and len(jobs) > 1:
            half = len(jobs) // 2
            return self.grade(jobs[:half]) + self.grade(jobs[half:])
        try:
            return self._ask(jobs, message)
        except Closed:
            self.start()
        if len(jobs) > 1:
            return [outcome for job in jobs for outcome in self.grade([job])]
        return [failure(KILLED, f"the reward of example {Example(**jobs[0][0]).name} {ENDED_SUPERVISOR}")]

    def _ask(self, jobs: list[PlainJob], message: bytes) -> list[Outcome]:
        self.await_ready()
        asked = time.monotonic()
        self.send(len(jobs), message)
        answers = self.receive(_patience(self.config, len(jobs)))
        self.seconds_a_job = (time.monotonic() - asked) / len(jobs)
        if not isinstance(answers, list) or len(answers) != len(jobs):
            raise Closed("no answers")
        return [outcome_from(answer) for answer in answers]

    def start(self) -> None:
        """Raises Closed if it is no longer wanted: a thread may still be waiting for its answer."""
        self.end()
        if self.closed:
            raise Closed("the run ends")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, json.dumps([place or os.getcwd() for place in sys.path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                # Ctrl-C is for the trainer, which ends its workers.
                start_new_session=True,
                # A worker is one of several, and OpenMP threads do not survive its fork.
                env={**os.environ, "OMP_NUM_THREADS": "1", self.mark[0]: self.mark[1]},
            )
        assert self.process.stdin and self.process.stdout
        self.stream = Stream(self.process.stdout.fileno(), self.process.stdin.fileno())
        self.ready, self.stopped = False, 0
        self.send({"environment": self.environment, "limits": asdict(self.config)})

    def send(self, *messages: Any) -> None:
        """Raises Closed if they are not read."""
        send(self.stream.writes, *messages)

    def receive(self, seconds: float) -> Any:
        """The next message. Raises Closed if there is none within `seconds`, or the keeper stays stopped."""
        # Checks are counted, as the clock runs on while this process itself is stopped.
        for _ in range(math.ceil(seconds / LOOK_SECONDS)):
            with contextlib.suppress(Silent):
                return receive(self.stream.reads, self.stream.inbox, LOOK_SECONDS)
            if self.closed:
                raise Closed("the run ends")
            if self.stays_stopped():
                raise Closed("a signal has stopped it")
        raise Closed(f"no answer for {seconds:g} s")

    def stays_stopped(self) -> bool:
        """Whether the last STOPPED_LOOKS calls, which should be LOOK_SECONDS apart, have found it stopped."""
        process = self.process
        self.stopped = self.stopped + 1 if process and is_stopped(process.pid) else 0
        return self.stopped >= STOPPED_LOOKS

    def await_ready(self) -> None:
        """Starts it if it has ended. Raises UserError if it cannot load the environment."""
        if self.process is None:
            self.start()
        if self.ready:
            return
        try:
            # Without checks whether it is stopped: giving it up here would end the run.
            error = receive(self.stream.reads, self.stream.inbox, START_SECONDS)["error"]
        except Closed as closed:
            error = f"its process ended ({closed})"
        if error:
            raise UserError(
                f"{self.environment['name']} cannot be loaded in a reward worker: {error}. See {self.log}; "
                'rewards.isolate = "never" grades in the trainer\'s own process'
            )
        self.ready = True

    def close(self) -> None:
        """Ends it for good."""
        self.closed = True
        self.end()

    def end(self) -> None:
        """Ends the keeper, which kills its worker and all that the worker has started."""
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
            end_marked("=".join(self.mark))  # it did not shut down cleanly, so its descendants may be left
        self.process = None
        with contextlib.suppress(FileNotFoundError):  # already deleted
            if not self.log.stat().st_size:
                self.log.unlink()


def fields_of(example: Example) -> dict[str, Any]:
    """An example as plain data. Raises UserError if its metadata is not plain data."""
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
