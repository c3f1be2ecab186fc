"""What worker processes add to a conversation: two turns of a trivial environment, with a model that answers at once.

    python -m benchmarks.conversations [--conversations 64]

Prints milliseconds per conversation in the trainer's own process and in workers, the best of 10.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.rewards import best
from lockstep.config import RewardConfig
from lockstep.rl import Example, Reply
from lockstep.rl.conversations.runner import ConversationRunner
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, worker_task
from lockstep.rl.environments.loading import EnvironmentSource, load_environment
from lockstep.rl.grading.exchange import ConversationEnded, ReplyRequest
from lockstep.rl.grading.pool import open_workers

TASK = """
import lockstep.rl as rl

class Talk(rl.ConversationEnvironment):
    def examples(self, split):
        return [rl.Example("p")]

    async def converse(self, example, chat):
        chat.add(example.prompt)
        await chat.reply()
        chat.add("And?")
        return float(len((await chat.reply()).text))
"""


def held(runner: AbstractContextManager[Any], count: int) -> list[float]:
    """The rewards of all conversations."""
    rewards: dict[int, float] = {}
    with runner as talks:
        while len(rewards) < count:
            said = talks.next(wait=True)
            if isinstance(said, ReplyRequest):
                talks.answer(said.number, said.request, Reply("word " * 100))
            elif isinstance(said, ConversationEnded) and said.outcome:
                rewards[said.number] = said.outcome.rewards["reward"]
    return [rewards[number] for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64)
    count = parser.parse_args().conversations
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(TASK)
        environment_name = f"{folder / 'task.py'}:Talk"
        environment, examples = load_environment(environment_name), [Example(f"p{n}") for n in range(count)]
        here: Callable[[], list[float]] = lambda: held(ConversationRunner(environment, examples, RewardConfig()), count)  # noqa: E731
        expected, tasks = here(), [worker_task(example, 0) for example in examples]
        print(f"{count} conversations, trainer's own process: {1000 * best(here, 10) / count:.2f} ms each")
        for workers in (1, 2):
            source, limits = EnvironmentSource(environment_name), RewardConfig(workers=workers)
            with open_workers(source, limits, folder) as opened:
                assert held(WorkerConversationRunner(tasks, opened), count) == expected
                seconds = best(lambda: held(WorkerConversationRunner(tasks, opened), count), 10)
            per_conversation = f"{1000 * seconds / count:.2f} ms each"
            print(f"{count} conversations, {workers} supervisor{'s' * (workers > 1)}: {per_conversation}")


if __name__ == "__main__":
    main()
