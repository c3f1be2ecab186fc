"""Conversations of several turns with the families' templates: what is scored is what a server would have sampled."""

import random
import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import ConversationEncoder, load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.data.conversations import Conversation
from tests.data.family_templates import FAMILIES
from tests.data.test_end_tokens import write_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
WORDS = ("two", "7", "<think>", "assistant\n", "  ä", "}}", "it's 4.\n", "[INST]", "user: ", "日本")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A family, and a folder with its template and a tokenizer."""
    family = FAMILIES[request.param]
    return family, _folder(tmp_path_factory.mktemp(request.param), family.template, family.special, family.plain)


def _folder(folder, template, special, plain=()):
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0]}
    write_tokenizer(folder, template, special[-1], special, plain, **settings)
    return folder


@pytest.fixture(scope="module")
def sides(family):
    return _sides(family[1])


def _sides(folder):
    from transformers import AutoTokenizer

    tokenizer, template = load_tokenizer(folder), load_chat_template(folder)
    return AutoTokenizer.from_pretrained(folder), ConversationEncoder(tokenizer, template)


def _text(draw):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 4))).strip() or "-"


def _answer(draw, family, called=False):
    message = {"role": "assistant", "content": _text(draw)}
    if called and not (family.says_why and draw.random() < 0.3):
        message["content"] = ""
    if family.reasoning and draw.random() < 0.5:
        message["reasoning_content"] = message["thinking"] = f"hm, {draw.randint(0, 99)}"
    if called:
        arguments = {"a": draw.randint(0, 9), "b": _text(draw)}
        message["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    return message


def _conversation(draw, family):
    messages = [{"role": "system", "content": _text(draw)}] if family.system and draw.random() < 0.5 else []
    if not messages and family.starts and draw.random() < 0.2:
        messages.append(_answer(draw, family))
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": _text(draw)})
        for _ in range(draw.randint(0, 2) if family.tools else 0):
            messages += [_answer(draw, family, called=True), {"role": "tool", "content": f"result: {_text(draw)}"}]
        messages.append(_answer(draw, family))
    return messages


def _sequences(encoded):
    """Each complete sequence's tokens, and which are scored."""
    starts = [0, *(branch.start for branch in encoded.branches), len(encoded.tokens)]
    lead = encoded.tokens[: starts[1]]
    for start, stop, shared in zip(starts, starts[1:], [0, *(branch.shared for branch in encoded.branches)]):
        before = lead[:shared].tolist()
        yield before + encoded.tokens[start:stop].tolist(), [False] * shared + encoded.scored[start:stop].tolist()


def _scored_parts(encoded):
    """Every run of scored tokens, with what comes before it."""
    for tokens, scored in _sequences(encoded):
        edges = np.flatnonzero(np.diff([False, *scored, False]))
        for start, stop in zip(edges[::2], edges[1::2]):
            yield tokens[:start], tokens[start:stop]


def _problem(seed, family):
    draw = random.Random(f"{seed} {family.template}")
    messages = _conversation(draw, family)
    return messages, {"tools": TOOLS} if "tools" in family.template and draw.random() < 0.5 else {}


@pytest.mark.parametrize("seed", range(4))
def test_each_answer_is_scored_as_a_server_would_have_sampled_it(family, sides, seed):
    (theirs, encoder), (messages, tools) = sides, _problem(seed, family[0])
    (encoded,) = encoder.encode([Conversation("line 1", {"messages": messages, **tools})])
    assert not encoded.problem, messages
    expected = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index:
            prompt = theirs.apply_chat_template(messages[:index], add_generation_prompt=True, tokenize=False, **tools)
            said = theirs(family[0].sampled(message), add_special_tokens=False)["input_ids"]
            expected.append((theirs(prompt, add_special_tokens=False)["input_ids"], said))
    found = list(_scored_parts(encoded))
    if messages[0]["role"] == "assistant":
        said = theirs(family[0].sampled(messages[0]), add_special_tokens=False)["input_ids"]
        found.remove(next(part for part in found if part[1] == said))
    assert sorted(found) == sorted(expected)
    whole = ConversationEncoder(encoder.tokenizer, encoder.template, turns="whole")
    (encoded,) = whole.encode([Conversation("line 1", {"messages": messages, **tools})])
    tokens = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **tools)["input_ids"]
    assert encoded.tokens.tolist() == tokens and not encoded.branches
    answers = sum(message["role"] == "assistant" for message in messages)
    assert len(list(_scored_parts(encoded))) == answers, "each has something scored in the whole conversation too"


PUBLIC = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"
"""The families' own templates, which TRL has."""
SPECIAL = re.compile(
    r"<[|｜][^<>'\" ]*[|｜]>|</?s>|<[be]os>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|\[/?INST\]|\[gMASK\]"
)
WITH_IMAGES = ("idefics", "llava", "smolvlm", "_vl")
IN_SHORT = (
    "cohere2", "deepseekv3", "gemma3", "gemma4_v5", "glm4moe", "gptoss", "lfm2_v2", "llama3_1", "nemotron_3_nano",
    "phi3_5", "qwen2_5", "qwen3", "qwen3_6", "qwen3_instruct_2507",
)  # fmt: skip
NAMES = sorted(p.stem for p in PUBLIC.glob("*.jinja") if not any(n in p.stem for n in (*WITH_IMAGES, "_training")))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.slow) for name in NAMES]
)
def test_what_a_public_template_renders_is_scored_answer_by_answer_or_refused_by_its_reason(name, tmp_path):
    source = (PUBLIC / f"{name}.jinja").read_text()
    names = [*sorted(set(SPECIAL.findall(source))), "<|the end|>"]
    theirs, encoder = _sides(_folder(tmp_path, source, names))
    kinds = Counter()
    for seed in range(4 if name in IN_SHORT else 20):
        draw = random.Random(seed)
        tools, reasoning = "tool" in source and draw.random() < 0.5, "reasoning" in source and draw.random() < 0.5
        family = replace(FAMILIES["chatml"], tools=tools, says_why=True, reasoning=reasoning)
        messages = _conversation(draw, family)
        values = {"tools": TOOLS} if any("tool_calls" in message for message in messages) else {}
        try:
            theirs.apply_chat_template(messages, tokenize=False, **values)
        except Exception:  # a template may raise anything
            kinds["refused there"] += 1
            continue
        for turns in ("apart", "whole"):
            encoder.turns = turns
            (encoded,) = encoder.encode([Conversation("line 1", {"messages": messages, **values})])
            if encoded.problem:
                assert re.search(
                    r"does not show (the reasoning|the content|tool calls)|has .tools., which", encoded.problem
                )
                kinds["refused here"] += 1
                continue
            said = [theirs.decode(part) for _, part in _scored_parts(encoded)]
            answers = [message for message in messages if message["role"] == "assistant"]
            assert len(said) == len(answers), (turns, messages, said)
            for message in answers:
                called = ["add" for _ in message.get("tool_calls", ())]
                # Gemma 4's has what is said beside a call behind the call's result, so in the whole not in one piece.
                shown = called if called and turns == "whole" else [message["content"].strip(), *called]
                thought = [message["thinking"]] if turns == "apart" and "thinking" in message else []
                assert any(all(part in text for part in (*shown, *thought)) for text in said), (turns, message, said)
            assert not any("result: " in text for text in said)
            kinds["scored"] += 1
    assert kinds["scored"] >= 2, kinds
