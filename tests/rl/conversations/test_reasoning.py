"""What rewards take for a reply's answer: what it says behind its reasoning, also where only the prompt tells."""

import pytest

import lockstep.rl as rl
from lockstep.config import RewardConfig, RLConfig
from lockstep.rl.conversations.reasoning import answer_text, reasoning_text
from lockstep.rl.environments.gsm8k import GSM8K
from lockstep.rl.environments.math_jsonl import Math
from tests.rl.collected import collected


class OwnGSM8K(GSM8K):
    marks_reasoning = False


class OwnMath(Math):
    marks_reasoning = False


@pytest.mark.parametrize(
    ("text", "reasoning", "said"),
    [
        ("yes", "", "yes"),
        ("\n<think>hm</think>yes </think>", "hm", "yes </think>"),
        ("<think>hm", "hm", ""),
        ("hm</think>yes", "hm", "yes"),
        ("the tag <think> opens", "", "the tag <think> opens"),
        ("```\n</think>\n```", "", "```\n</think>\n```"),
        ("```\na\n```\n</think>yes", "```\na\n```\n", "yes"),
    ],
)
def test_a_text_is_reasoning_up_to_its_end_tag(text, reasoning, said):
    assert (reasoning_text(text), answer_text(text)) == (reasoning, said)


@pytest.mark.parametrize(
    ("name", "prompt", "reply", "marked"),
    [
        ("qwen3_5_think", "<think>\n", "Try \\boxed{5}? Let", "<think>Try \\boxed{5}? Let"),
        ("qwen3_5_think", "<think>\n", "hm</think>yes", "hm</think>yes"),
        ("qwen3_5_think", "<think>\n", "```\nhm</think>yes", "<think>```\nhm</think>yes"),
        ("qwen3", "", "<think>hm</think>yes", "<think>hm</think>yes"),
        ("qwen3", "", "<think>hm", "<think>hm"),
        ("qwen3", "<think>\n\n</think>\n\n", "say </think>", "<think></think>say </think>"),
        ("llama3_1", "", "yes", "yes"),
    ],
)
def test_a_reply_is_marked_where_its_text_alone_misleads(renderings, name, prompt, reply, marked):
    rendering = renderings[name]
    parts = rendering.reply_parts(rendering.tokenizer.encode(reply), rendering.tokenizer.encode(prompt))
    assert rendering.with_marks(reply, parts) == marked and answer_text(marked).strip() == parts.content.strip()


@pytest.mark.parametrize(("ready", "own"), [(GSM8K, OwnGSM8K), (Math, OwnMath)])
def test_reasoning_that_the_prompt_begins_is_marked_for_ready_environments_alone(ready, own, engine_of, renderings):
    engine, rendering = engine_of("qwen3_5_think"), renderings["qwen3_5_think"]
    config = RLConfig(samples_per_prompt=2, max_new_tokens=4, rewards=RewardConfig())
    marked, plain = (
        [rollout.completion for rollout in collected([rl.Example("q")], kind(), engine, rendering, config)]
        for kind in (ready, own)
    )
    assert all(plain) and marked == [f"<think>{text}" for text in plain]
