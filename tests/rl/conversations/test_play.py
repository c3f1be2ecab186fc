"""Conversations over one engine: what is trained on is what it computed, and what fails costs its own conversation."""

import asyncio
import inspect
import random
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch

import lockstep
import lockstep.rl as rl
from lockstep.config import EngineConfig, RewardConfig, RLConfig
from lockstep.errors import UserError
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.environments.loading import EnvironmentSource, load_environment
from lockstep.rl.grading import refuse_too_many
from lockstep.rl.grading.pool import open_workers
from lockstep.rl.rollouts.records import episodes_of
from lockstep.rl.rollouts.rewards import assign_rewards
from tests.rl.collected import collected, held_out

EXAMPLES = [rl.Example("stone"), rl.Example("river", answer="r")]


class Talk(rl.ConversationEnvironment):
    """Three turns, a tool's result among them; the last one forgets what was said before."""

    delays = random.Random(0)
    longest_delay = 0.0

    async def converse(self, example, chat):
        chat.add("Answer in a word.", role="system")
        for said, role in ((example.prompt, "user"), ("3 <|im_end|>", "tool"), ("And?", "user")):
            chat.add(said, role=role)
            await asyncio.sleep(self.delays.random() * self.longest_delay)
            await chat.reply()
        del chat.messages[1:-1]
        chat.add("Again.")
        reply = await chat.reply()
        return {"length": float(len(reply.text)), "e": reply.text.count("e")}


def config(**changes):
    return RLConfig(**(dict(samples_per_prompt=3, max_new_tokens=10) | changes))


def talk(environment, engine, rendering, grader=None, **changes):
    return collected(EXAMPLES, environment, engine, rendering, config(**changes), grader=grader)


def graded(environment, engine, rendering, limit=1.0, grader=None, **changes):
    rollouts = talk(environment, engine, rendering, grader, **changes)
    refuse_too_many(assign_rewards(rollouts, environment, config(**changes).rewards, grader), limit)
    return rollouts


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param("qwen3", 0.7, marks=pytest.mark.slow),
        ("llama3", 1.0),
        pytest.param("deepseek_r1_distill", 1.0, marks=pytest.mark.slow),
        (None, 0.7),
    ],
)
def test_a_row_scored_by_the_trainer_has_the_log_probabilities_of_the_conversation(
    name, temperature, engine_of, renderings
):
    engine = engine_of(name or "llama3")
    rendering = renderings[name] if name else Rendering(engine.tokenizer)
    given = []
    add = engine.add
    engine.add = lambda prompt, params: given.append(prompt) or add(prompt, params)
    rollouts = talk(Talk(), engine, rendering, temperature=temperature)
    assert [len(rows) for rows in episodes_of(rollouts)] != [1] * 6
    assert {(r.group, r.episode) for r in rollouts} == {(g, e) for g in range(2) for e in range(3)}
    rows = [r.prompt_ids + r.token_ids for r in rollouts]
    for rollout, row, scores in zip(rollouts, rows, lockstep.score(engine.model, rows, temperature=temperature)):
        own = torch.tensor([float(scores[target - 1]) for target in rollout.targets()])
        assert torch.equal(own, torch.tensor(rollout.logprobs)) and len(own) > 0
        assert rollout.targets()[-1] == len(row) - 1
    beginnings = [(row[:t], row, t) for r, row in zip(rollouts, rows) for t in starts(r)]
    assert sorted(given) == sorted(start for start, _, _ in beginnings), "each prompt is a row up to a reply"


def starts(rollout):
    """Where replies begin in a row."""
    targets = rollout.targets()
    return [t for t in targets if t - 1 not in targets]


def test_draws_do_not_depend_on_who_answers_when(engine_of, renderings):
    class Slow(Talk):
        longest_delay = 0.02

    rendering = renderings["qwen3"]
    first = talk(Talk(), engine_of("qwen3"), rendering, max_new_tokens=5)
    for environment, sequences in ((Slow(), 2), (Talk(), 1)):
        again = talk(environment, engine_of("qwen3", sequences), rendering, max_new_tokens=5)
        assert [(r.token_ids, r.logprobs) for r in again] == [(r.token_ids, r.logprobs) for r in first]
    assert len({str(r.token_ids) for r in first}) == len(first), "each has draws of its own"
    other = collected(EXAMPLES, Talk(), engine_of("qwen3"), rendering, config(max_new_tokens=5), extra_round=1)
    assert [r.token_ids for r in other] != [r.token_ids for r in first], "another round, other draws"


def test_in_workers_the_tokens_and_rewards_are_those_of_this_process(tmp_path, engine_of, renderings):
    rendering = renderings["llama3"]
    first = graded(Talk(), engine_of("llama3"), rendering)
    slow = inspect.getsource(Talk).replace("longest_delay = 0.0", "longest_delay = 0.02")
    examples = "    def examples(self, split):\n        return [rl.Example('p')]\n"
    (tmp_path / "task.py").write_text(f"import asyncio, random\nimport lockstep.rl as rl\n\n{slow}\n{examples}")
    source, limits = EnvironmentSource(f"{tmp_path / 'task.py'}:Talk"), RewardConfig(workers=2, concurrent=2)
    with open_workers(source, limits, tmp_path) as workers:
        again = graded(load_environment(source.name), engine_of("llama3", 2), rendering, grader=workers)
    for field in ("token_ids", "logprobs", "sampled", "scores", "group", "episode", "completion"):
        assert [getattr(r, field) for r in again] == [getattr(r, field) for r in first]
    assert [r.conversation.messages for r in again] == [r.conversation.messages for r in first]


def test_rewards_are_those_of_the_conversation_for_each_of_its_rows(engine_of, renderings):
    rollouts = graded(Talk(), engine_of("llama3"), renderings["llama3"])
    for rows in episodes_of(rollouts):
        assert len(rows) == 2 and rows[0].scores.rewards == rows[1].scores.rewards
        said = rows[0].conversation.messages[-1]["content"]
        assert rows[0].scores.rewards == {"length": float(len(said)), "e": float(said.count("e"))}
        assert rows[0].conversation.turns == 4
    first, again = (held_out(EXAMPLES, Talk(), engine_of("llama3"), renderings["llama3"], config()) for _ in range(2))
    assert [r.token_ids for r in first] == [r.token_ids for r in again] and len(episodes_of(first)) == 2


class Endless(rl.ConversationEnvironment):
    unfinished, words, turns = -1.0, 1, 3

    async def converse(self, example, chat):
        chat.add(example.prompt)
        while True:
            await chat.reply()
            chat.add("more " * self.words)


class Catching(Endless):
    turns = 2

    async def converse(self, example, chat):
        try:
            await super().converse(example, chat)
        except rl.ConversationOver:
            return 7.0


class Long(Endless):
    words, turns = 60, 100


class Asks(Endless):
    """Of two rewards, where it is not over at once."""

    async def converse(self, example, chat):
        chat.add("x")
        await chat.reply()
        if example.answer:
            raise rl.ConversationOver
        return {"length": 1.0, "e": 2.0}


def test_a_limit_of_turns_or_tokens_ends_a_conversation(engine_of, renderings):
    engine, rendering = engine_of("llama3"), renderings["llama3"]
    for environment, turns, reward in ((Endless(), 3, -1.0), (Catching(), 2, 7.0)):
        rollouts = graded(environment, engine, rendering, samples_per_prompt=1, max_new_tokens=4)
        assert {(r.conversation.turns, r.scores.reward) for r in rollouts} == {(turns, reward)}
        assert all(r.conversation.over and not r.scores.failure for r in rollouts)
    rollouts = graded(Asks(), engine, rendering, max_new_tokens=2)
    expected = [{"length": 1.0, "e": 2.0}] * 3 + [{"length": -1.0, "e": -1.0}] * 3
    assert [r.scores.rewards for r in rollouts] == expected, "one number stands for all names"
    rollouts = graded(Long(), engine, rendering, samples_per_prompt=1)
    assert all(1 < r.conversation.turns < 10 and r.conversation.over for r in rollouts)
    assert all(len(r.prompt_ids + r.token_ids) <= 512 and r.sampled[-1] for r in rollouts)
    with pytest.raises(UserError, match="first prompt of .* tokens and max_new_tokens 600"):
        talk(Long(), engine, rendering, max_new_tokens=600)
    small = lockstep.Engine(engine.model, EngineConfig(max_tokens_per_step=64, cache_tokens=64), engine.tokenizer)
    with pytest.raises(UserError, match="'stone': its first .*max_new_tokens 100 do not fit in the cache of 64 tokens"):
        talk(Long(), small, rendering, max_new_tokens=100)


class Silent(rl.ConversationEnvironment):
    async def converse(self, example, chat):
        chat.add(example.prompt)
        await chat.reply()


class Ungraded(Silent):
    async def grade(self, example, episodes):
        return None


class Short(Silent):
    async def grade(self, example, episodes):
        return [1.0]


class Refused(Talk):
    async def converse(self, example, chat):
        chat.add(example.prompt)
        chat.add("", role="assistant", tool_calls=[])
        await chat.reply()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Silent(), "Silent.converse returned no rewards, and there is no `reward`, for example .*; return a number"),
        (Ungraded(), "Ungraded.converse returned no rewards, nor did `grade`, and there is no `reward`,"),
        (Short(), r"Short.grade returned \[1.0\], not a list with one reward per episode \(here 3\), for"),
        (Refused(), "example 'stone': the model's chat template refuses these messages"),
    ],
)
def test_what_no_conversation_of_an_environment_can_do_ends_the_run_by_name(engine_of, renderings, environment, said):
    with pytest.raises(UserError, match=said):
        graded(environment, engine_of("llama3_1"), renderings["llama3_1"], limit=0.0, max_new_tokens=2)


class Broken(list):
    def __repr__(self):
        raise KeyError("oh")

    __iter__ = __repr__


class Failing(rl.ConversationEnvironment):
    """Examples whose answer says how their conversations fail."""

    async def converse(self, example, chat):
        chat.add(example.prompt)
        kind = example.answer
        if kind == "raises at once":
            raise KeyError("oh")
        if kind == "asks nothing":
            return 1.0
        await chat.reply()
        match kind:
            case "raises":
                raise KeyError("oh")
            case "exits":
                raise SystemExit(3)
            case "cancelled":
                raise asyncio.CancelledError
            case "sleeps":
                await asyncio.sleep(60)
            case "stays":
                while True:
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(60)
            case "says strange things":
                chat.messages.append({"role": "user", "content": object()})
            case "asks strange things":
                chat.messages.append("no dict")
                await chat.reply()
            case "breaks when shown":
                return Broken()
            case "breaks when read":
                chat.messages = Broken()
            case "is no number":
                return float("nan")
        while kind == "gives up":
            try:
                await asyncio.wait_for(chat.reply(), 0.002)
            except TimeoutError:
                pass
            except rl.ConversationOver:
                await asyncio.sleep(0.01)
        return 1.0


FAILURES = {
    **dict.fromkeys(("raises", "raises at once", "exits", "cancelled"), "raised"),
    **dict.fromkeys(("asks strange things", "breaks when shown"), "raised"),
    **dict.fromkeys(("sleeps", "stays", "gives up"), "timeout"),
    **dict.fromkeys(("says strange things", "breaks when read", "is no number", "asks nothing"), "invalid"),
}


def test_what_fails_costs_its_own_conversation(engine_of, renderings, caplog):
    examples = [rl.Example(f"p{n}", kind) for n, kind in enumerate(["", *FAILURES, "fine"])]
    given = config(samples_per_prompt=1, max_new_tokens=3, rewards=RewardConfig(seconds=0.5, on_failure="zero"))
    rollouts = collected(examples, Failing(), engine_of("llama3", 16), renderings["llama3"], given)
    outcomes = assign_rewards(rollouts, Failing(), given.rewards)
    expected = {example.answer: FAILURES.get(example.answer, "") for example in examples}
    assert {rows[0].example.answer: rows[0].scores.failure for rows in episodes_of(rollouts)} == expected
    without_reply = {r.example.answer for r in rollouts if not r.scores.counts}
    assert without_reply == {"raises at once", "asks nothing"}, "they count in no case"
    for (example, cause), outcome in zip(expected.items(), outcomes):
        assert cause != "raised" or "test_play.py:" in outcome.message, example
        assert not cause or ("Failing.converse" in outcome.message and "'p" in outcome.message), example
    assert "of 15 rewards failed" in caplog.text
    with pytest.raises(UserError, match="more rewards failed"):
        refuse_too_many(outcomes, 0.2)


class Group(rl.ConversationEnvironment):
    async def converse(self, example, chat):
        chat.add(example.prompt)
        reply = await chat.reply()
        return 100.0 if reply.text.startswith(self.certain) else None

    certain = "\0"
    seen: list

    async def grade(self, example, episodes):
        self.seen.append((example, [e.answer for e in episodes]))
        longest = max(len(e.answer) for e in episodes)
        return [{"reward": float(len(e.answer) == longest)} for e in episodes]


def test_a_group_is_graded_together(engine_of, renderings):
    environment = Group()
    environment.seen = []
    rollouts = graded(environment, engine_of("llama3"), renderings["llama3"])
    assert sorted(e.prompt for e, _ in environment.seen) == ["river", "stone"]
    for example, answers in environment.seen:
        own = [r for r in rollouts if r.example is example]
        assert [r.completion for r in own] == answers
        assert [r.scores.reward for r in own] == [float(len(a) == max(map(len, answers))) for a in answers]
    first = rollouts[0].completion
    environment.certain = first[0]
    rollouts = graded(environment, engine_of("llama3"), renderings["llama3"])
    assert rollouts[0].scores.reward == 100.0, "what converse returned stays"


def test_a_grade_that_fails_costs_its_group(engine_of, renderings):
    class Failing(Group):
        seen = []  # noqa: RUF012

        async def grade(self, example, episodes):
            match example.answer:
                case "raises":
                    raise ValueError("no")
                case "short":
                    return [1.0]
                case "sleeps":
                    await asyncio.sleep(60)
                case "none":
                    return None
            return await super().grade(example, episodes)

        def reward(self, example, completion):
            return {"reward": 42.0}

    causes = {"": "", "raises": "raised", "short": "invalid", "sleeps": "timeout", "none": ""}
    examples = [rl.Example(f"p{n}", kind) for n, kind in enumerate(causes)]
    given = config(samples_per_prompt=2, max_new_tokens=3, rewards=RewardConfig(seconds=0.5))
    rollouts = collected(examples, Failing(), engine_of("llama3", 16), renderings["llama3"], given)
    assign_rewards(rollouts, Failing(), given.rewards)
    assert [r.scores.failure for r in rollouts] == [cause for cause in causes.values() for _ in range(2)]
    assert [r.scores.reward for r in rollouts[-2:]] == [42.0] * 2, "without a grade, reward counts"


def test_a_function_that_blocks_is_named_and_in_the_end_refused(engine_of, renderings, caplog):
    class Blocking(Talk):
        def __init__(self, seconds):
            super().__init__()
            self.seconds, self.freed = seconds, threading.Event()

        async def converse(self, example, chat):
            chat.add(example.prompt)
            await chat.reply()
            self.freed.wait(self.seconds)
            return 1.0

    given = engine_of("llama3"), renderings["llama3"]
    environment = Blocking(60)
    with pytest.raises(UserError, match=r"test_play.py:\d+: Blocking.converse has not awaited anything for"):
        talk(environment, *given, rewards=RewardConfig(seconds=0.1))
    assert "run them in asyncio.to_thread" in caplog.text
    environment.freed.set()
    # The loop turns again, and one that took too long in this way has failed by it.
    rollouts = graded(Blocking(0.4), *given, samples_per_prompt=2, rewards=RewardConfig(seconds=0.3))
    assert {r.scores.failure for r in rollouts} == {"timeout"}


def test_a_reply_that_is_given_up_is_not_mistaken_for_the_next(engine_of, renderings):
    class Hasty(Talk):
        async def converse(self, example, chat):
            chat.add(example.prompt)
            try:
                await asyncio.wait_for(chat.reply(), 0.001)
            except TimeoutError:
                chat.add("Or rather:")
            both = asyncio.gather(chat.reply(), chat.reply(), return_exceptions=True)
            first, second = await both
            assert isinstance(second, RuntimeError), "one after the other"
            assert chat.messages[-1]["content"] == first.text
            return 1.0

    engine = engine_of("llama3")
    rollouts = graded(Hasty(), engine, renderings["llama3"], max_new_tokens=40)
    assert not any(r.scores.failure for r in rollouts) and not engine.has_work
    for rows in episodes_of(rollouts):
        assert rows[-1].completion == rows[-1].conversation.messages[-1]["content"]


@pytest.fixture
def interruptible():
    """Ctrl-C raises: a process that a shell runs in the background begins with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_conversations_and_requests(engine_of, renderings, interruptible):
    class Waiting(Talk):
        async def converse(self, example, chat):
            chat.add(example.prompt)
            await chat.reply()
            if example.answer:
                signal.raise_signal(signal.SIGINT)
                try:
                    await asyncio.sleep(60)
                finally:
                    self.cancelled = True

    environment, engine = Waiting(), engine_of("llama3")
    with pytest.raises(KeyboardInterrupt):
        talk(environment, engine, renderings["llama3"])
    assert not engine.has_work
    deadline = time.monotonic() + 5
    while not getattr(environment, "cancelled", False) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert environment.cancelled
    assert len(talk(Talk(), engine, renderings["llama3"])) == 12


def test_a_reply_says_how_many_tokens_it_read_and_has(engine_of, renderings):
    class Counts(rl.ConversationEnvironment):
        async def converse(self, example, chat):
            found = {}
            for turn in range(2):
                chat.add(example.prompt)
                reply = await chat.reply()
                found |= {f"prompt_{turn}": reply.prompt_tokens, f"completion_{turn}": reply.completion_tokens}
            return found

    for own in episodes_of(graded(Counts(), engine_of("llama3"), renderings["llama3"], samples_per_prompt=1)):
        row, counts = own[-1], own[-1].scores.rewards
        turns = [counts["completion_0"], counts["completion_1"]]
        assert len(own) == 1 and sum(turns) == row.num_sampled and min(turns) > 0
        assert counts["prompt_0"] == len(row.prompt_ids)
        assert counts["prompt_1"] + turns[1] == len(row.prompt_ids) + len(row.token_ids)
