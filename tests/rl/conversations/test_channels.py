"""Conversations of a model that speaks in channels: environments get its final channel, the rows keep its tokens."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

import lockstep.rl as rl
from lockstep.config import RLConfig
from lockstep.data import load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.conversations.tools import answer_calls
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.generators.remote import RemoteSample
from lockstep.rl.grading.exchange import reply_from
from lockstep.rl.rollouts.rewards import assign_rewards
from tests.rl.collected import collected, held_out
from tests.rl.conversations.families import shown, write_family

THINK_END = "<|channel|>analysis<|message|>I add 2 and 3.<|end|><|start|>assistant"
CALLS = THINK_END + '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}<|call|>'
CALCULATOR = f"{Path(__file__).parents[3] / 'examples' / 'calculator.py'}:Calculator"
ANSWERS = THINK_END + "<|channel|>final<|message|>Answer: 5<|return|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, bpe_tokenizer):
    folder = tmp_path_factory.mktemp("channels") / "gptoss"
    write_family(folder, "gptoss", bpe_tokenizer)
    return folder


def rendering_with(folder, tools=()):
    tokenizer = load_tokenizer(folder)
    ends = [tokenizer.special_tokens()[name] for name in ("<|return|>", "<|call|>")]
    return Rendering(tokenizer, load_chat_template(folder), ends, tools)


@dataclass
class Reciting:
    """A generator that says what it is told to, at the interface that remote ones have too."""

    rendering: Rendering
    replies: list[str]
    weights_version: int = 0
    max_positions: int = 4096
    cache_tokens: int = 65536
    prompts: list[list[int]] = field(default_factory=list)

    @property
    def tokenizer(self):
        return self.rendering.tokenizer

    def _next(self):
        tokens = self.tokenizer.encode(self.replies[(len(self.prompts) - 1) % len(self.replies)])
        return RemoteSample(tokens, [-1.0] * len(tokens), finish_reason="stop")

    def add(self, prompt, params):
        self.prompts.append(prompt)
        return len(self.prompts)

    def samples(self, request_id):
        return [self._next()]

    def generate(self, prompts, params, first=None):
        self.prompts += prompts
        return [[self._next().completion()] for _ in prompts]

    def step(self):
        pass

    def abort(self, request_id):
        pass


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


class Sums(rl.ConversationEnvironment):
    tools = (add,)

    async def converse(self, example, chat):
        chat.add(example.prompt)
        reply = await chat.reply()
        assert (reply.text, reply.reasoning) == ("", "I add 2 and 3.")
        await answer_calls(chat, reply, self.tools)
        await chat.reply()
        chat.add("Sure?")
        await chat.reply()
        return None

    def reward(self, example, completion):
        return float(completion == "Answer: 5")


def conversed(environment, engine, config=None):
    config = config or RLConfig(samples_per_prompt=1, max_new_tokens=64)
    rendering = engine.rendering
    rollouts = collected([rl.Example("2 + 3?")], environment, engine, rendering, config)
    assign_rewards(rollouts, environment, config.rewards)
    return rollouts


def test_a_conversation_has_calls_and_reasoning_as_its_template_wants_them_and_keeps_the_sampled_tokens(folder):
    engine = Reciting(rendering_with(folder, (add,)), [CALLS, ANSWERS, ANSWERS])
    rollouts = conversed(Sums(), engine)
    tokenizer, template = engine.tokenizer, engine.rendering.template
    messages = rollouts[0].conversation.messages
    function = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    thought = dict.fromkeys(("reasoning_content", "thinking"), "I add 2 and 3.")
    assert messages == [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", **thought, "tool_calls": [function]},
        {"role": "tool", "content": "5", "name": "add"},
        {"role": "assistant", "content": "Answer: 5", **thought},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Answer: 5", **thought},
    ]
    # The template shows no turn as it was sampled, so each is a row, with its prompt as at inference.
    assert [r.token_ids for r in rollouts] == [tokenizer.encode(reply) for reply in engine.replies]
    for rollout, turns in zip(rollouts, (1, 3, 5)):
        expected = template.render(messages[:turns], tools=engine.rendering.schemas)
        assert shown(tokenizer, rollout.prompt_ids) == expected
        assert rollout.logprobs == [-1.0] * len(rollout.token_ids)
    assert ["I add" in shown(tokenizer, rollout.prompt_ids) for rollout in rollouts] == [False, True, False]
    assert [rollout.completion for rollout in rollouts] == ["", "Answer: 5", "Answer: 5"]
    assert rollouts[0].conversation.tool_calls == 1 and rollouts[-1].scores.reward == 1.0


def test_a_call_that_cannot_be_read_is_answered_with_its_problem(folder):
    class Tries(Sums):
        async def converse(self, example, chat):
            chat.add(example.prompt)
            await answer_calls(chat, await chat.reply(), self.tools)
            return float("not valid JSON" in chat.messages[-1]["content"] and (await chat.reply()).text == "Answer: 5")

    engine = Reciting(rendering_with(folder, (add,)), [CALLS.replace("3}", "3"), ANSWERS])
    assert conversed(Tries(), engine)[-1].scores.reward == 1.0


@pytest.mark.parametrize("name", ["digit_sum", CALCULATOR])  # of one answer, and a conversation
def test_environments_and_validation_get_the_final_channel(folder, name):
    environment, rendering, example = load_environment(name), rendering_with(folder), rl.Example("2 + 3?", answer="5")
    for reply, completion in (
        (ANSWERS, "Answer: 5"), (THINK_END, ""), (THINK_END.replace("I add", "Answer: 5"), ""),
        ("Answer: 5<|return|>", "Answer: 5"),
    ):  # fmt: skip
        engine = Reciting(rendering, [reply])
        for rollouts in (
            conversed(environment, engine),
            held_out([example], environment, engine, rendering, RLConfig()),
        ):
            assert [rollout.completion for rollout in rollouts] == [completion]


def test_a_reply_survives_the_way_to_a_worker():
    reply = rl.Reply("yo", "stop", (rl.ToolCall("f", {"a": [1]}),), 3, 2, "hm", {"thinking": "hm"})
    assert reply_from(json.loads(json.dumps(asdict(reply)))) == reply
