"""Environments of the package verifiers, with the real package: `pip install 'verifiers>=0.4,<0.5'`."""

import sys

import pytest

from lockstep.config import RewardConfig
from lockstep.errors import UserError
from lockstep.rl.conversations import Reply
from lockstep.rl.conversations.tools import schema_of
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, worker_task
from lockstep.rl.environments.loading import EnvironmentSource, load_environment
from lockstep.rl.grading.exchange import ConversationEnded
from lockstep.rl.grading.pool import GraderPool, open_grader
from lockstep.rl.rollouts.prompts import examples_of
from tests.rl.conversations.scripted import call, converse

TASKS = '''
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    async def setup_task(self, task):
        self.calls = 0

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        self.calls += 1
        return a + b + 0 * self.calls

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def correct(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.1)
    async def used_tool(self, trace) -> float:
        return float(any("4" in m.content for m in trace.tool_messages))

class SumConfig(vf.TasksetConfig):
    first: int = 0

class Sums(vf.Taskset[SumTask, SumConfig]):
    INFINITE = True
    def load(self):
        n = self.config.first
        while True:
            data = SumData(prompt=f"{n}+{n}?", answer=str(2 * n), system_prompt="Be short.")
            yield SumTask(data, self.config.task)
            n += 1

__all__ = ["Sums"]
'''
GAME = """
import verifiers.v1 as vf

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass

class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Game(vf.Env[GameConfig]):
    async def run(self, task, agents):
        said = []
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and len(said) < 3:
                said.append(segment.last_reply)
                if len(said) < 3:
                    segment = await interaction.turn(f"again after {segment.last_reply}")
        interaction.trace.record_reward("turns", len(said) / 3)
        interaction.trace.record_reward("same", float(len(set(said)) == 1), 0.5)

class Words(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            yield Task(vf.TaskData(prompt=f"Say word {n}."), self.config.task)

__all__ = ["Words", "Game"]
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


@pytest.mark.slow
def test_tasks_are_solved_with_tools_and_rewarded_as_the_package_does(package, tmp_path):
    settings = tmp_path / "settings.toml"
    settings.write_text("first = 2\n")
    environment = load_environment(package("my_sums", TASKS), str(settings))
    assert [schema_of(tool)["function"]["name"] for tool in environment.tools] == ["adder_add"]
    examples = examples_of(environment, "train")
    assert len(examples) == 9000 and len(examples_of(environment, "validation")) == 1000
    assert examples[0].prompt == "2+2?"
    right = ["I add. " + call("adder_add", a=2, b=2), "<think>so</think>\n\n4"]
    rewards, chat = converse(environment, examples[0], *right)
    assert rewards == {"correct": 2.0, "used_tool": 0.1}
    assert [(m["role"], m["content"]) for m in chat.messages if m["role"] != "assistant"] == [
        ("system", "Be short."),
        ("user", "2+2?"),
        ("tool", "4"),
    ]
    assert converse(environment, examples[0], "5")[0] == {"correct": 0.0, "used_tool": 0.0}
    rewards, chat = converse(environment, examples[0], call("adder_add", a="2"), "4")
    assert rewards["used_tool"] == 0.0 and "must be of the type integer" not in rewards
    assert 'the argument "b" is missing' in chat.messages[-2]["content"]
    assert converse(environment, examples[0])[0] == {"correct": 0.0, "used_tool": 0.0}, "cut short before a reply"


def test_an_environment_that_runs_several_turns_is_the_user(package):
    environment = load_environment(package("my_words", GAME))
    assert len(examples_of(environment, "train")) == 18
    example = examples_of(environment, "train")[0]
    rewards, chat = converse(environment, example, "a", "a", "a")
    assert rewards == {"turns": 1.0, "same": 0.5}
    assert [m["content"] for m in chat.messages][::2] == ["Say word 0.", "again after a", "again after a"]
    assert converse(environment, example, "a", "b")[0] == {"turns": 2 / 3, "same": 0.0}
    thinks = Reply("hm</think> a", reasoning="hm", content="a")
    _, chat = converse(environment, example, thinks, "<think>hm</think> b", "c")
    assert [m["content"] for m in chat.messages][::2] == ["Say word 0.", "again after a", "again after b"]


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
def test_tasks_are_solved_in_workers(package, tmp_path):
    ends = held_in_workers(package("my_sums", TASKS), tmp_path)
    assert [end.rewards for end in ends] == [{"correct": 2.0, "used_tool": 0.0}] * 4


@pytest.mark.slow
def test_tasks_that_every_worker_would_have_otherwise_are_refused(package, tmp_path):
    drawn = TASKS.replace("n = self.config.first", "import os; n = int.from_bytes(os.urandom(4))")
    ends = held_in_workers(package("my_drawn_sums", drawn), tmp_path)
    assert all("yields different tasks each time it is loaded" in end.message for end in ends)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((GAME, "player: vf", "other: vf.AgentConfig = vf.AgentConfig()\n    player: vf"), "the agents other, player"),
        ((TASKS, "@vf.reward(weight=2.0)", "NEEDS_CONTAINER = True\n    @vf.reward(weight=2.0)"), "need a container"),
        ((TASKS, "(self, task, trace) -> float", "(self, task, trace, runtime) -> float"), "rewards need a runtime"),
        ((TASKS, "@vf.reward(weight=0.1)", "@vf.stop"), "stops by single requests"),
        ((GAME, "    pass", "    async def setup(self, trace, runtime): pass"), "its own Task.setup"),
        ((GAME, '__all__ = ["Words", "Game"]', ""), "cannot be loaded .*defines no `__all__`"),
    ],
)
def test_what_cannot_be_run_is_refused(package, changes, message):
    source, old, new = changes
    assert old in source
    with pytest.raises(UserError, match=message):
        load_environment(package("my_refused", source.replace(old, new)))


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
