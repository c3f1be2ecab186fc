"""The ready environments' rewards where they run: in worker processes, and without torch."""

import os
import subprocess
import sys

import pytest

import lockstep.rl as rl
from lockstep.config import RewardConfig
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, worker_task
from lockstep.rl.environments.loading import EnvironmentSource, load_environment
from lockstep.rl.environments.protocol import Example
from lockstep.rl.grading.exchange import ConversationEnded
from lockstep.rl.grading.pool import open_grader, open_workers
from lockstep.rl.grading.sandbox import missing_protections
from lockstep.workers.processes import descendants

TASK = """
import lockstep.rl as rl
from pathlib import Path

class Finds(rl.ConversationEnvironment):
    def __init__(self, data):
        self.index = Path(data).read_text().split()

    def examples(self, split):
        return []

    async def converse(self, example, chat):
        chat.add(example.prompt)
        chat.add(self.index[int((await chat.reply()).text)])
        self.index.clear()
        return 1.0
"""


def graded(tmp_path, name, *jobs):
    source, limits = EnvironmentSource(name), RewardConfig(isolate="always", workers=1, seconds=30)
    with open_workers(source, limits, tmp_path) as grader:
        return grader(list(jobs))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or bool(missing_protections()), reason="this machine allows no sandbox")
def test_code_is_tested_in_workers_and_what_stops_its_tests_is_wrong_within_the_limit(tmp_path):
    example = Example("p", metadata={"tests": "assert twice(4) == 8"})
    stopping = "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)"
    outcomes = graded(tmp_path, "code", (example, "def twice(x): return 2 * x"), (example, stopping))
    assert [(o.cause, o.rewards["correct"]) for o in outcomes] == [("", 1.0), ("", 0.0)]


@pytest.mark.parametrize(
    ("name", "isolate", "workers"), [("math", "auto", 1), ("math", "never", 0), ("gsm8k", "auto", 0)]
)
def test_what_takes_long_is_graded_in_workers_unless_told_otherwise(tmp_path, name, isolate, workers):
    source, limits = EnvironmentSource(name), RewardConfig(isolate=isolate, workers=1)
    before = set(descendants(os.getpid()))
    with open_grader(load_environment(name), limits, source, tmp_path):
        started = set(descendants(os.getpid())) - before
    assert bool(started) == bool(workers)


def test_what_init_loads_is_loaded_once_and_shared_by_conversations(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "words.txt").write_text("zero one two three")
    source = EnvironmentSource(f"{tmp_path / 'task.py'}:Finds", str(tmp_path / "words.txt"))
    found = {}
    with open_workers(source, RewardConfig(workers=2), tmp_path) as workers:
        for supervisor in workers.supervisors:
            supervisor.await_ready()
        (tmp_path / "words.txt").unlink()
        with WorkerConversationRunner([worker_task(Example("?"), n) for n in range(4)], workers) as runner:
            while len(found) < 4:
                said = runner.next(wait=True)
                if isinstance(said, ConversationEnded):
                    found[said.number] = said.messages[-1]["content"]
                else:
                    runner.answer(said.number, said.request, rl.Reply(str(said.number)))
    assert found == dict(enumerate(["zero", "one", "two", "three"])), "what one changes is not seen by others"


def test_the_environments_import_no_torch():
    code = (
        "import sys, lockstep.rl.environments.loading as l; l.load_environment('math'); l.load_environment('code'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
