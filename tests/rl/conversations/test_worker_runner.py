"""The ready environments' rewards where they run: in worker processes, and without torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config import RewardConfig
from lockstep.rl.conversations import Reply, ToolCall
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, worker_task
from lockstep.rl.environments.loading import EnvironmentSource, load_environment
from lockstep.rl.environments.protocol import Example
from lockstep.rl.grading.exchange import ConversationEnded
from lockstep.rl.grading.pool import open_grader, open_workers
from lockstep.rl.grading.sandbox import missing_protections
from lockstep.workers.processes import descendants

RETRIEVAL = f"{Path(__file__).parents[3] / 'examples' / 'retrieval.py'}:Retrieval"


def graded(tmp_path, name, *jobs):
    source, limits = EnvironmentSource(name), RewardConfig(isolate="always", workers=1, seconds=30)
    with open_workers(source, limits, tmp_path) as grader:
        return grader(list(jobs))


def test_mathematics_is_compared_in_workers_and_what_hangs_is_wrong(tmp_path):
    example = Example("p", "\\frac{1}{2}")
    replies = ["\\boxed{0.5}", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{\\frac{2}{4}}", "\\boxed{"]
    outcomes = graded(tmp_path, "math", *[(example, reply) for reply in replies])
    assert [(o.cause, o.rewards) for o in outcomes] == [("", {"correct": c}) for c in (1.0, 0.0, 1.0, 0.0)]


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


def test_texts_are_searched_in_workers_with_the_index_that_their_supervisor_has_built(tmp_path):
    (tmp_path / "documents").mkdir()
    for number in range(50):
        (tmp_path / "documents" / f"{number}.txt").write_text(f"The word of text {number} is w{number}.")
    (tmp_path / "train.jsonl").write_text('{"question": "?", "answer": "w7"}\n')
    source, limits = (
        EnvironmentSource(RETRIEVAL, str(tmp_path)),
        RewardConfig(isolate="always", workers=2, seconds=30),
    )
    answers = {}
    with open_workers(source, limits, tmp_path) as workers:
        for supervisor in workers.supervisors:
            supervisor.await_ready()
        shutil.rmtree(tmp_path / "documents")
        tasks = [worker_task(Example("?", "w7"), number) for number in range(8)]
        with WorkerConversationRunner(tasks, workers) as runner:
            while len(answers) < len(tasks):
                said = runner.next(wait=True)
                if isinstance(said, ConversationEnded):
                    answers[said.number] = said.messages[-2]["content"]
                elif said.request == 1:
                    searches = tuple(ToolCall("search", {"query": f"w{n}"}) for n in (7, 8, said.number))
                    runner.answer(said.number, 1, Reply("", tool_calls=searches))
                else:
                    runner.answer(said.number, said.request, Reply("Answer: w7"))
    for number, answer in answers.items():
        assert answer == f"[{number}] The word of text {number} is w{number}."


def test_the_environments_import_no_torch():
    code = (
        "import sys, lockstep.rl.environments.loading as l; l.load_environment('math'); l.load_environment('code'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
