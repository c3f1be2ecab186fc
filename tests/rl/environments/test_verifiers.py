"""Environments of the package verifiers, with the real package: `pip install 'verifiers>=0.4,<0.5'`."""

import sys

import pytest

from lockstep.config import RewardConfig
from lockstep.errors import UserError
from lockstep.rl.conversations import Reply
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, worker_task
from lockstep.rl.environments.loading import EnvironmentSource, load_environment
from lockstep.rl.grading.exchange import ConversationEnded
from lockstep.rl.grading.pool import GraderPool, open_grader
from lockstep.rl.rollouts.prompts import examples_of
from tests.rl.conversations.scripted import converse

TASKS = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def correct(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

class SumConfig(vf.TasksetConfig):
    first: int = 0

class Sums(vf.Taskset[SumTask, SumConfig]):
    INFINITE = True
    def load(self):
        n = self.config.first
        while True:
            yield SumTask(SumData(prompt=f"{n}+{n}?", answer=str(2 * n), system_prompt="Be short."), self.config.task)
            n += 1

__all__ = ["Sums"]
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package of tasks, as it would be installed."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return f"verifiers:{name}"

    return write


def test_tasks_without_end_are_bounded_and_a_file_has_their_settings(package, tmp_path):
    settings = tmp_path / "settings.toml"
    settings.write_text("first = 2\n")
    environment = load_environment(package("my_sums", TASKS), str(settings))
    examples = examples_of(environment, "train")
    assert len(examples) == 9000 and len(examples_of(environment, "validation")) == 1000
    assert examples[0].prompt == "2+2?"
    rewards, chat = converse(environment, examples[0], "<think>so</think>\n\n4")
    assert rewards == {"correct": 2.0}
    assert [(m["role"], m["content"]) for m in chat.messages[:2]] == [("system", "Be short."), ("user", "2+2?")]
    assert converse(environment, examples[0], "5")[0] == {"correct": 0.0}
    assert converse(environment, examples[0])[0] == {"correct": 0.0}, "cut short before a reply"


def held_in_workers(name, folder):
    """How a conversation about each of four examples ends, where the model doubles the number that it is asked."""
    ends, environment = [], load_environment(name)
    source, limits = EnvironmentSource(name), RewardConfig(workers=2, seconds=30)
    with open_grader(environment, limits, source, folder) as workers:
        assert isinstance(workers, GraderPool)
        tasks = [worker_task(example, 0) for example in examples_of(environment, "train")[:4]]
        with WorkerConversationRunner(tasks, workers) as runner:
            while len(ends) < len(tasks):
                said = runner.next(wait=True)
                if isinstance(said, ConversationEnded):
                    ends.append(said.outcome)
                else:
                    asked = int(said.messages[1]["content"].partition("+")[0])
                    runner.answer(said.number, said.request, Reply(str(2 * asked)))
    return ends


@pytest.mark.slow
def test_tasks_are_solved_in_workers_unless_every_worker_would_have_others(package, tmp_path):
    ends = held_in_workers(package("my_sums", TASKS), tmp_path)
    assert [end.rewards for end in ends] == [{"correct": 2.0}] * 4
    drawn = TASKS.replace("n = self.config.first", "import os; n = int.from_bytes(os.urandom(4))")
    ends = held_in_workers(package("my_drawn_sums", drawn), tmp_path)
    assert all("yields different tasks each time it is loaded" in end.message for end in ends)


def test_a_package_that_is_not_there_and_settings_that_are_wrong_are_named(package, tmp_path):
    with pytest.raises(UserError, match="verifiers:no-such-tasks: cannot be loaded"):
        load_environment("verifiers:no-such-tasks")
    with pytest.raises(UserError, match=r"nothing.toml: cannot be read as TOML"):
        load_environment(package("my_sums", TASKS), str(tmp_path / "nothing.toml"))
    (tmp_path / "settings.toml").write_text("frist = 2\n")
    with pytest.raises(UserError, match="verifiers:my_sums: cannot be loaded .*frist"):
        load_environment(package("my_sums", TASKS), str(tmp_path / "settings.toml"))


def test_without_verifiers_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(UserError, match=r"pip install 'verifiers>=0.4,<0.5'"):
        load_environment("verifiers:x")
