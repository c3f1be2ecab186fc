"""Replies taken apart, whole and as they come, compared with transformers' own reading and openai-harmony's."""

import ast
import importlib.util
import json
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import ByteTokenizer, StreamDecoder, load_tokenizer
from lockstep.data.replies import (
    DEEPSEEK,
    GPT_OSS,
    PLAIN,
    ReplyParts,
    ReplyReader,
    ToolCall,
    parse_calls,
    read_reply,
    reply_form,
    tool_format,
)
from tests.rl.conversations.families import template_source, write_family

FAMILIES = ["gptoss", "qwen3", "qwen2_5", "deepseekv3", "deepseek_r1_distill", "llama3_1"]
PROMPTS = {
    "gptoss": "<|start|>assistant",
    "deepseekv3": "<｜Assistant｜>",
    "deepseek_r1_distill": "<｜Assistant｜><think>\n",
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
"""What a reply continues; Qwen's otherwise."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory, bpe_tokenizer):
    found = {name: tmp_path_factory.mktemp("replies") / name for name in FAMILIES}
    for name, folder in found.items():
        write_family(folder, name, bpe_tokenizer)
    return found


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


def prompt_of(name):
    return PROMPTS.get(name, "<|im_start|>assistant\n")


def read(tokenizers, name, reply, prompt=None, tools=True):
    """A reply, given as text or tokens, whole; that it is the same as it comes is checked on the way."""
    tokenizer = tokenizers[name]
    tokens = tokenizer.encode(reply) if isinstance(reply, str) else reply
    before = tokenizer.encode(prompt_of(name) if prompt is None else prompt)
    form = reply_form(tokenizer, template_source(name), tools)
    whole = read_reply(form, tokenizer, tokens, before, {tokenizer.eos_id})
    reader, pieces = ReplyReader(form, StreamDecoder(tokenizer), before), []
    for token in tokens:
        pieces += reader.push(token)
    pieces += reader.finish()
    assert reader.parts() == whole
    sampled = "".join(piece.text for piece in pieces if piece.sampled)
    assert sampled == tokenizer.decode(tokens) or "\N{REPLACEMENT CHARACTER}" in sampled
    if "</think>" not in "".join(piece.text for piece in pieces if piece.section == "content"):
        for section in ("reasoning", "content"):
            assert "".join(p.text for p in pieces if p.section == section) == getattr(whole, section)
    return whole


ANALYSIS, FINAL = "<|channel|>analysis<|message|>hmm<|end|>", "<|channel|>final<|message|>yo"
NEXT = "<|start|>assistant"


@pytest.mark.parametrize(
    ("reply", "reasoning", "content"),
    [
        (f"{ANALYSIS}{NEXT}{FINAL}<|return|>", "hmm", "yo"),
        (f"{FINAL}<|return|>", "", "yo"),
        (f"{ANALYSIS}{NEXT}{FINAL}", "hmm", "yo"),
        (f"{ANALYSIS}{NEXT}<|channel|>final<|message|>", "hmm", ""),
        (f"{ANALYSIS}{NEXT}<|channel|>fin", "hmm", ""),
        (f"{ANALYSIS}{NEXT}", "hmm", ""),
        ("<|channel|>analysis<|message|>hm", "hm", ""),
        ("<|channel|>anal", "", ""),
        ("", "", ""),
        (f"{ANALYSIS}{NEXT}{ANALYSIS}{NEXT}{FINAL}<|return|>", "hmm\nhmm", "yo"),
        (
            f"{ANALYSIS}{NEXT}<|channel|>commentary<|message|>I look it up.<|end|>{NEXT}{FINAL}",
            "hmm\nI look it up.",
            "yo",
        ),
        # Without the tokens between two messages, as models sometimes write.
        (f"<|channel|>analysis<|message|>hmm{FINAL}<|return|>", "hmm", "yo"),
        (f"<|channel|>analysis<|message|>hmm{NEXT}{FINAL}<|return|>", "hmm", "yo"),
        # A turn of somebody else is not what the assistant says.
        (f"{FINAL}<|end|><|start|>user<|message|>and?<|end|>{NEXT}<|channel|>final<|message|>no", "", "yo\nno"),
        # A model that was tuned to answer without channels.
        ("yo<|return|>", "", "yo"),
        ("to be or not", "", "to be or not"),
    ],
)
def test_of_channels_only_the_final_one_is_content(tokenizers, reply, reasoning, content):
    assert read(tokenizers, "gptoss", reply) == ReplyParts(reasoning, content)


def test_sections_end_at_tokens_alone_and_keep_characters_that_are_cut_off(tokenizers):
    tokenizer = tokenizers["gptoss"]
    said = [token for character in "<|channel|>analysis<|message|>" for token in tokenizer.encode(character)]
    reply = [*tokenizer.encode("<|channel|>final<|message|>"), *said, *tokenizer.encode("<|return|>")]
    assert read(tokenizers, "gptoss", reply) == ReplyParts("", "<|channel|>analysis<|message|>")
    for name, begin, end in (("gptoss", ANALYSIS[:-7], f"<|end|>{NEXT}{FINAL}"), ("qwen3", "<think>", "</think>yo")):
        tokenizer = tokenizers[name]
        half, *_ = tokenizer.encode("😀")
        found = read(tokenizers, name, [*tokenizer.encode(begin), half, *tokenizer.encode(end)])
        assert found.reasoning.endswith("\N{REPLACEMENT CHARACTER}") and found.content == "yo"
    # A prompt may begin the final channel itself.
    prompt = "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>"
    assert read(tokenizers, "gptoss", "yo<|return|>", prompt) == ReplyParts("", "yo")
    assert read(tokenizers, "gptoss", "inal<|message|>yo<|return|>", prompt[:-15]) == ReplyParts("", "yo")


ARGUMENTS = '{"query": "a \\"b\\"</tool_call> ü", "limit": 3}'
CALL = ToolCall("functions_f", json.loads(ARGUMENTS))


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.functions_f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.functions_f<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.functions_f json<|message|>",
        "<|channel|>analysis to=functions.functions_f code<|message|>",
        " to=functions.functions_f<|channel|>commentary json<|message|>",
        " to=functions.functions_f<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.functions_f<|message|>",
    ],
)
def test_a_message_to_a_function_is_a_call(tokenizers, header):
    assert read(tokenizers, "gptoss", f"{header}{ARGUMENTS}<|call|>") == ReplyParts("", "", (CALL,))
    thought = f"{ANALYSIS}{NEXT}{header}{ARGUMENTS}<|call|>"
    assert read(tokenizers, "gptoss", thought) == ReplyParts("hmm", "", (CALL,))
    assert parse_calls(thought, GPT_OSS) == (CALL,)
    for cut in range(1, len(ARGUMENTS)):
        (found,) = read(tokenizers, "gptoss", header + ARGUMENTS[:cut]).calls
        assert found.problem and found.name == CALL.name
    (unended,) = read(tokenizers, "gptoss", header + ARGUMENTS).calls
    assert unended.problem == "the reply ends before <|call|>"


FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
BARE = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


@pytest.mark.parametrize("form", [FENCED, BARE])
def test_deepseeks_calls_of_both_generations(tokenizers, form):
    calls = (CALL, ToolCall("function", {}), ToolCall("g", {"a": ["<｜tool▁call▁end｜>", "```"]}))
    written = [form.format(name=c.name, arguments=json.dumps(c.arguments, ensure_ascii=False)) for c in calls]
    text = "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"
    assert read(tokenizers, "deepseekv3", f"<think>hm</think>I ask.\n\n{text}<｜end▁of▁sentence｜>") == ReplyParts(
        "hm", "I ask.", calls
    )
    assert read(tokenizers, "deepseekv3", text, "<｜Assistant｜><think>\n") == ReplyParts(text, "")
    assert parse_calls(text, DEEPSEEK) == calls
    assert read(tokenizers, "deepseekv3", text, tools=False) == ReplyParts("", text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<｜tool▁calls▁begin｜>", "there is no <｜tool▁call▁begin｜> after <｜tool▁calls▁begin｜>"),
        ("<｜tool▁call▁begin｜>f", "must have a name and its arguments"),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "not valid JSON"),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "ends before <｜tool▁call▁end｜>"),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>[]<｜tool▁call▁end｜>", "must be a JSON object"),
        ("<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>", "must have a name"),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} so<｜tool▁call▁end｜>", "only <｜tool▁call▁end｜> may follow"),
        (FENCED.replace("\n```<", "<").format(name="f", arguments="{}"), "only <｜tool▁call▁end｜> may follow"),
    ],
)
def test_a_call_of_deepseeks_that_cannot_be_read_says_why_and_the_next_one_is_read(tokenizers, text, problem):
    first, *others = read(tokenizers, "deepseekv3", text).calls
    assert problem in first.problem and not others
    if "▁call▁end" in text:
        after = text + BARE.format(name="g", arguments="{}")
        assert read(tokenizers, "deepseekv3", after).calls[1:] == (ToolCall("g"),)


@pytest.mark.parametrize(
    ("name", "prompt", "reply", "reasoning", "content"),
    [
        ("qwen3", None, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("qwen3", None, "\n<think>\nhm\n</think>\n\nyes\n", "hm", "yes\n"),
        ("qwen3", None, " yes", "", " yes"),
        ("qwen3", None, "<think>\n\n</think>\n\nyes", "", "yes"),
        ("qwen3", None, "<think>\nhm", "hm", ""),
        ("qwen3", None, "<think>", "", ""),
        ("qwen3", None, "<think>hm</think>see <think> and </think>", "hm", "see <think> and </think>"),
        ("qwen3", None, "the tag <think> opens", "", "the tag <think> opens"),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nyes", "hm", "yes"),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "hm", "hm", ""),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "<think>\nhm</think>yes", "hm", "yes"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "yes", "", "yes"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "so </think> ends", "", "so </think> ends"),
        ("qwen3", "what is <think> for?<|im_end|>\n<|im_start|>assistant\n", "a tag", "", "a tag"),
        ("deepseek_r1_distill", None, "hm\n</think>\n\nyes<｜end▁of▁sentence｜>", "hm", "yes"),
        ("deepseek_r1_distill", None, "hm\n", "hm", ""),
        ("deepseek_r1_distill", "<｜Assistant｜>", "hm</think>yes", "hm", "yes"),
        ("llama3_1", None, "<think>hm</think>yes", "hm", "yes"),
    ],
)  # fmt: skip
def test_reasoning_is_what_the_reply_has_between_the_tags_first(tokenizers, name, prompt, reply, reasoning, content):
    assert read(tokenizers, name, reply, prompt) == ReplyParts(reasoning, content)


def test_the_form_is_the_templates_or_else_the_vocabularys_and_a_tag_is_text_where_there_is_no_token(tokenizers):
    assert reply_form(tokenizers["gptoss"]).channels and reply_form(tokenizers["qwen3"]).thinks
    assert reply_form(tokenizers["llama3_1"]) == reply_form(ByteTokenizer()) == PLAIN
    assert not reply_form(tokenizers["gptoss"], "{{ messages }}").channels, "a model tuned to another template"
    assert tool_format(template_source("gptoss")) is GPT_OSS
    assert tool_format(template_source("deepseekv3")) is tool_format(template_source("deepseek_r1_distill")) is DEEPSEEK
    thought, called = "<think>hm</think>yes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for name, text, expected in (
        ("qwen3", thought, ReplyParts("", thought)),
        ("llama3_1", thought, ReplyParts("hm", "yes")),
        ("qwen3", called, ReplyParts("", called)),
    ):
        assert read(tokenizers, name, [t for character in text for t in tokenizers[name].encode(character)]) == expected
    form = reply_form(ByteTokenizer(), "{{ '<think>' }} … </think>")
    found = read_reply(form, ByteTokenizer(), list(b"hm</think>yes"), list(b"? <think>\n"))
    assert form.texts and found == ReplyParts("hm", "yes")


WORDS = st.lists(
    st.sampled_from(["hm", "yes", "so, ", "\n", " ", "ü", "😀", "a{b}", "1", "analysis"]), min_size=1, max_size=6
).map("".join)
THOUGHTS = st.none() | WORDS.filter(str.strip)
CALLS = st.lists(st.dictionaries(st.text("ab", min_size=1), st.integers() | WORDS, max_size=2), max_size=2)


@settings(max_examples=30, derandomize=True)
@given(thought=THOUGHTS, content=WORDS, calls=CALLS, name=st.sampled_from(["gptoss", "qwen3", "deepseek_r1_distill"]))
def test_replies_are_read_as_transformers_reads_them(folders, tokenizers, thought, content, calls, name):
    reply = _written(name, thought, content, calls)
    theirs = _theirs(folders[name]).parse_response(reply, prefix=prompt_of(name))
    found = read(tokenizers, name, reply)
    assert found.reasoning == (theirs.get("reasoning_content") or theirs.get("thinking") or "").strip()
    # It strips what a model says at both ends.
    assert found.content.strip() == theirs.get("content", "").strip()
    called = [call["function"] for call in theirs.get("tool_calls", [])]
    assert [{"name": call.name, "arguments": call.arguments} for call in found.calls] == called


def _written(name, thought, content, calls):
    if name == "gptoss":
        message = f"{FINAL[:-2]}{content}<|return|>"
        if calls:
            message = f" to=functions.f<|channel|>commentary json<|message|>{json.dumps(calls[0])}<|call|>"
        thought = thought and thought.strip()
        return (f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else "") + message
    if name == "deepseek_r1_distill":
        return f"{thought or ''}</think>\n\n{content}<｜end▁of▁sentence｜>"
    written = [json.dumps({"name": "f", "arguments": arguments}) for arguments in calls]
    said = content + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in written)
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + f"{said}<|im_end|>"


@cache
def _theirs(folder):
    """transformers' tokenizer, with the description of replies that trl gives it; trl itself takes long to import."""
    from transformers import PreTrainedTokenizerFast

    spec = importlib.util.find_spec("trl")
    source = (Path(spec.submodule_search_locations[0]) / "chat_template_utils.py").read_text()
    wanted = f"{folder.name}_template"
    (value,) = (
        node.value for node in ast.parse(source).body if isinstance(node, ast.Assign) and node.targets[0].id == wanted
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.response_template = ast.literal_eval(value)
    return tokenizer


@settings(max_examples=40, derandomize=True)
@given(data=st.data(), name=st.sampled_from(FAMILIES), opened=st.booleans())
def test_whatever_is_sampled_is_the_same_whole_and_as_it_comes(tokenizers, data, name, opened):
    tokenizer = tokenizers[name]
    marks = list(reply_form(tokenizer, template_source(name), True).ids)
    texts = [
        t for text in ('{"name": "f", ', " to=functions.f", "\n", "<think>", "ü😀") for t in tokenizer.encode(text)
    ]
    tokens = data.draw(st.lists(st.sampled_from([*marks, *texts]), max_size=20))
    found = read(tokenizers, name, tokens, prompt_of(name) + "<think>\n" * (opened and name != "gptoss"))
    for call in found.calls:
        assert call.problem or call.name


class HarmonyTokenizer:
    """gpt-oss's own vocabulary."""

    def __init__(self, encoding):
        self._encoding = encoding
        names = (f"<|{name}|>" for name in ("return", "constrain", "channel", "start", "end", "message", "call"))
        self._special = {name: self.encode(name)[0] for name in names}

    def encode(self, text):
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids):
        return self._encoding.decode([token for token in ids if token not in self._special.values()])

    def special_tokens(self):
        return self._special

    vocabulary = special_tokens


@pytest.mark.slow
def test_channels_are_read_as_openai_harmony_reads_them():
    """With its vocabulary, which it takes from the net, or from the folder in TIKTOKEN_ENCODINGS_BASE."""
    harmony = pytest.importorskip("openai_harmony")
    try:
        encoding = harmony.load_harmony_encoding("HarmonyGptOss")
    except harmony.HarmonyError:
        pytest.skip("openai-harmony's vocabulary is not at hand")
    tokenizer, draw, assistant = HarmonyTokenizer(encoding), random.Random(0), harmony.Role.ASSISTANT
    words = ["yo", "größer 😀", "\n\n", '{"a": 1}', "analysis", "to=functions.x", "<|channel|>", "<|end", " "]

    def message(channel, content=None):
        content = content or "".join(draw.choices(words, k=draw.randint(1, 6)))
        return harmony.Message.from_role_and_content(assistant, content).with_channel(channel)

    for number in range(200):
        messages = [message(draw.choice(["analysis", "commentary"])) for _ in range(draw.randint(0, 3))]
        last = message("final")
        if number % 2:
            last = message("commentary", json.dumps({"a": draw.choice(words)}))
            last = last.with_recipient("functions.f").with_content_type("<|constrain|>json")
        tokens = encoding.render_conversation_for_training(harmony.Conversation.from_messages([*messages, last]))
        tokens = tokens[len(tokenizer.encode(NEXT)) :]
        theirs = encoding.parse_messages_from_completion_tokens(tokens, assistant)
        shown = [(m.channel == "final", m.content[0].text) for m in theirs if not m.recipient]
        called = [ToolCall("f", json.loads(m.content[0].text)) for m in theirs if m.recipient == "functions.f"]
        found = read_reply(reply_form(tokenizer), tokenizer, tokens)
        assert found.content == "\n".join(text for is_final, text in shown if is_final)
        assert found.reasoning == "\n".join(text for is_final, text in shown if not is_final)
        assert list(found.calls) == called
