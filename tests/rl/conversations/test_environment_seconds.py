"""How long the environment's own turns of a conversation take, wherever it is held: never the wait for the model."""

import time
from functools import partial

import lockstep.rl as rl
from lockstep.config import RewardConfig
from lockstep.rl.conversations.runner import ConversationRunner
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, worker_task
from lockstep.rl.environments.loading import EnvironmentSource, load_environment
from lockstep.rl.grading.exchange import ConversationEnded
from lockstep.rl.grading.pool import open_workers

TASK = """
import asyncio, os, time
import lockstep.rl as rl
from tests.rl.grading.misbehaving import Misbehaving

class Slow(Misbehaving, rl.ConversationEnvironment):
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

    def exits(self):
        time.sleep(0.2)
        os._exit(0)
"""


def held(make_runner):
    """How a conversation ends, and for how long the model was not asked."""
    began, waited = time.monotonic(), 0.0
    with make_runner() as talk:
        while not isinstance(said := talk.next(wait=True), ConversationEnded):
            asked = time.monotonic()
            time.sleep(0.1)
            waited += time.monotonic() - asked
            talk.answer(said.number, said.request, rl.Reply("yes"))
    return said, time.monotonic() - began - waited


def test_the_seconds_are_those_of_the_environments_turns_without_the_models(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    name = f"{tmp_path / 'task.py'}:Slow"
    environment = load_environment(name)
    with open_workers(EnvironmentSource(name), RewardConfig(workers=1, seconds=1.5), tmp_path) as workers:
        for prompt, least in (("fine", 0.06), ("exits", 0.2), ("blocks", 1.5), ("freezes", 1.5)):
            runners = [partial(WorkerConversationRunner, [worker_task(rl.Example(prompt), 0)], workers)]
            if prompt == "fine":
                runners.append(partial(ConversationRunner, environment, [rl.Example("fine")], RewardConfig()))
            for make_runner in runners:
                ended, without_the_model = held(make_runner)
                assert least <= ended.environment_seconds <= without_the_model
                if prompt == "fine":
                    assert 0.06 <= ended.seconds["own"] <= ended.environment_seconds
                else:
                    assert ended.outcome.cause, "one that is ended has the seconds that it took"
