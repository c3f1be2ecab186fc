"""Conversations of which more are held than wanted: the longest groups are given up, wherever they are."""

import asyncio
import inspect
from contextlib import nullcontext

import pytest

import lockstep.rl as rl
from lockstep.config import RewardConfig, RLConfig
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.grading.pool import open_workers
from tests.rl.collected import collected

EXAMPLES = [
    rl.Example("a", "many"),
    rl.Example("b"),
    rl.Example("c", "waits"),
    rl.Example("d"),
    rl.Example("e", "many"),
]


class Talk(rl.ConversationEnvironment):
    """A reply; of "many" as many as are allowed, and after three of "waits" a wait that has no end."""

    turns = 40

    def examples(self, split):
        return [rl.Example("p")]

    async def converse(self, example, chat):
        chat.add(example.prompt)
        await chat.reply()
        for turn in range({"many": 40, "waits": 3}.get(example.answer, 0)):
            chat.add(f"more {turn}")
            await chat.reply()
        if example.answer == "waits":
            await asyncio.sleep(1000)
        return 1.0


def config(**changes):
    return RLConfig(**(dict(samples_per_prompt=2, max_new_tokens=6, rewards=RewardConfig(seconds=60)) | changes))


@pytest.mark.parametrize("place", ["here", pytest.param("in workers", marks=pytest.mark.slow)])
def test_the_longest_groups_are_given_up_in_the_middle_of_a_reply_or_of_the_environments_turn(
    place, tmp_path, engine_of, renderings
):
    def held(numbers, first):
        """Conversations about some of the examples, and how many tokens were sampled for them."""
        engine = engine_of("llama3", 16)
        rollouts = collected(
            EXAMPLES, Talk(), engine, renderings["llama3"], config(), grader=grader, numbers=numbers, first=first
        )
        assert not engine.has_work
        return rollouts, engine.statistics.tokens_sampled

    file = tmp_path / "task.py"
    file.write_text(f"import asyncio\nimport lockstep.rl as rl\n\n{inspect.getsource(Talk)}")
    source, limits = EnvironmentSource(f"{file}:Talk"), RewardConfig(workers=2, seconds=60)
    with open_workers(source, limits, tmp_path) if place == "in workers" else nullcontext() as grader:
        whole, _ = held([1, 3], None)
        for _ in range(2):  # the workers hold others afterwards
            kept, sampled = held(range(5), 2)
            assert plain(kept) == plain(whole) and len(kept) == 4
            assert sampled < 250  # of some 500


def plain(rollouts):
    return [(r.group, r.episode, r.token_ids, r.logprobs, r.finish_reason) for r in rollouts]
