"""How long the environment's own turns of a conversation take, wherever it is held: never the wait for the model."""

import time

import pytest

import lockstep.rl as rl
from lockstep.config import RewardConfig
from lockstep.rl.conversations.runner import ConversationRunner
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, worker_task
from lockstep.rl.environments.loading import EnvironmentSource, load_environment
from lockstep.rl.grading.exchange import ConversationEnded
from lockstep.rl.grading.pool import open_workers

TASK = """
import asyncio, os, signal, time
import lockstep.rl as rl

class Slow(rl.ConversationEnvironment):
    def examples(self, split):
        return [rl.Example("p")]

    async def converse(self, example, chat):
        own = 0.0
        for turn in range(3):
            began = time.monotonic()
            await asyncio.sleep(0.02)
            if turn == 1:
                getattr(self, example.prompt, str)()
            chat.add("Go on.")
            own += time.monotonic() - began
            if turn < 2:
                await chat.reply()
        chat.seconds["own"] = own
        return 1.0

    def freezes(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def blocks(self):
        time.sleep(1000)

    def exits(self):
        time.sleep(0.2)
        os._exit(0)
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    return f"{tmp_path / 'task.py'}:Slow"


def held(runner):
    """How a conversation ends, and for how long the model was not asked."""
    began, waited = time.monotonic(), 0.0
    with runner as talk:
        while not isinstance(said := talk.next(wait=True), ConversationEnded):
            asked = time.monotonic()
            time.sleep(0.3)
            waited += time.monotonic() - asked
            talk.answer(said.number, said.request, rl.Reply("yes"))
    return said, time.monotonic() - began - waited


@pytest.fixture(params=["here", "in a worker"])
def runner_of(request, task, tmp_path):
    """`runner_of(prompt)`: of one conversation in this process, or in a worker's."""
    rewards = RewardConfig(workers=1, seconds=5.0)
    if request.param == "here":
        environment = load_environment(task)
        yield lambda prompt: ConversationRunner(environment, [rl.Example(prompt)], rewards)
    else:
        with open_workers(EnvironmentSource(task), rewards, tmp_path) as workers:
            yield lambda prompt: WorkerConversationRunner([worker_task(rl.Example(prompt), 0)], workers)


def test_the_seconds_are_those_of_the_environments_turns_without_the_models(runner_of):
    ended, without_the_model = held(runner_of("fine"))
    assert 0.06 <= ended.seconds["own"] <= ended.environment_seconds <= without_the_model


@pytest.mark.parametrize(("fault", "least"), [("freezes", 0.5), ("blocks", 0.5), ("exits", 0.2)])
def test_a_conversation_that_is_ended_has_the_seconds_that_it_took(task, tmp_path, fault, least):
    source, limits = EnvironmentSource(task), RewardConfig(workers=1, seconds=0.5)
    with open_workers(source, limits, tmp_path) as workers:
        ended, without_the_model = held(WorkerConversationRunner([worker_task(rl.Example(fault), 0)], workers))
    assert ended.outcome.cause and least <= ended.environment_seconds <= without_the_model
