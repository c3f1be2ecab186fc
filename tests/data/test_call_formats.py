# ruff: noqa: E501
"""Tool calls in every family's format: written by the published templates, read whole and as they come."""

import json
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from lockstep.data import StreamDecoder, load_tokenizer
from lockstep.data.chat import ChatTemplate
from lockstep.data.messages import call_layout
from lockstep.data.replies import ReplyReader, ToolCall, parse_calls, read_reply, reply_form, tool_format
from lockstep.generate.server.call_rules import Tool
from lockstep.generate.server.reply_grammar import CallRule, reply_grammar
from tests.data.call_templates import CALL_FAMILIES, PARAMETERS, call_template, write_call_family


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, bpe_tokenizer):
    found = {}
    for name in CALL_FAMILIES:
        folder = tmp_path_factory.mktemp("calls") / name
        write_call_family(folder, name, bpe_tokenizer)
        found[name] = load_tokenizer(folder)
    return found


TOOLS = [
    {"type": "function", "function": {"name": n, "description": "", "parameters": p}} for n, p in PARAMETERS.items()
]
ASK = {"role": "user", "content": "?"}


def written(name, content, calls):
    """The last assistant message of a conversation as the real template writes it, after its generation prompt."""
    source = call_template(name)
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    message = {"role": "assistant", "content": content}
    if calls:
        plain = [
            {
                "id": f"call0000{n}",
                "type": "function",
                "function": {"name": c.name, "arguments": json.dumps(c.arguments)},
            }
            for n, c in enumerate(calls)
        ]
        message = call_layout(template).message(message | {"tool_calls": plain})
    values = dict(tools=TOOLS, bos_token="<s>", eos_token="</s>", chat_template=source)
    (before,), _ = render_jinja_template([[ASK]], add_generation_prompt=True, **values)
    (after,), _ = render_jinja_template([[ASK, message]], **values)
    opened = before.removesuffix("<think>\n")
    assert after.startswith(opened), (before, after)
    return after[len(opened) :]


@dataclass
class Read:
    content: str
    calls: list
    """(name, arguments' JSON) of each call."""


def both(tokenizer, name, text, parts=None):
    """A reply, read whole; that its calls are the same as they come is checked on the way."""
    form = reply_form(tokenizer, call_template(name), True).with_tools(TOOLS)
    tokens = [token for part in parts or [text] for token in tokenizer.encode(part)]
    whole = read_reply(form, tokenizer, tokens)
    reader, pieces = ReplyReader(form, StreamDecoder(tokenizer)), []
    for token in tokens:
        pieces += reader.push(token)
    pieces += reader.finish()
    assert reader.parts() == whole and reader.parts().written == whole.written
    grown, unread = {}, []
    for part in (part for piece in pieces for part in piece.calls):
        if part.call < 0:
            unread.append(part.unread)
        elif part.call not in grown:
            assert part.name, "the first part of a call has its name"
            grown[part.call] = (part.name, part.arguments)
        else:
            assert not part.name
            grown[part.call] = (grown[part.call][0], grown[part.call][1] + part.arguments)
    fine = [(each.call.name, each.arguments) for each in whole.written if not each.call.problem]
    bad = [each for each in whole.written if each.call.problem]
    if not bad:
        assert list(grown.values()) == fine and not unread
    else:
        assert [each for each in fine if each not in grown.values()] == []
    for each in whole.written:
        assert each.call.problem or json.loads(each.arguments) == each.call.arguments
    return whole


CALLS = (
    ToolCall("search", {"query": 'a "b"\n</tool\\_call> ü; {"name": "c"}', "limit": 3}),
    ToolCall("look_up", {"words": ["a", "</parameter>"], "deep": {"list": [1, 2.5, None, True]}, "on": False}),
    ToolCall("search", {"query": "12"}),
)


@pytest.mark.parametrize("content", ["", "I will look it up."])
@pytest.mark.parametrize("name", CALL_FAMILIES)
def test_calls_that_templates_write_are_read_as_they_were_whole_and_as_they_come(tokenizers, name, content):
    family = CALL_FAMILIES[name]
    if content and not family.says_why:
        pytest.skip("its template writes either")
    calls = CALLS[: 3 if family.many else 1]
    text = written(name, content, calls)
    found = both(tokenizers[name], name, text)
    assert found.calls == calls and found.content.strip() == content
    assert parse_calls(text, tool_format(call_template(name)), PARAMETERS) == calls


def test_a_string_is_a_string_only_if_the_schema_says_so():
    template = call_template("glm4moe")
    pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    for key, text, value in [
        ("query", "12", "12"),
        ("query", "null", "null"),
        ("limit", "12", 12),
        ("limit", "many", "many"),
        ("maybe", "null", None),
        ("maybe", "12", "12"),
        ("either", "12", 12),
        ("either", "x", "x"),
        ("unknown", "[1]", [1]),
        ("unknown", "x y", "x y"),
    ]:
        said = "<tool_call>search\n" + pair.format(key, text) + "</tool_call>"
        assert parse_calls(said, tool_format(template), PARAMETERS) == (ToolCall("search", {key: value}),), (key, text)
    python = "<tool_call>\n<function=look_up>\n<parameter=on>\nTrue\n</parameter>\n</function>\n</tool_call>"
    assert parse_calls(python, tool_format(call_template("qwen3_5_think")), PARAMETERS)[0].arguments == {"on": True}


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("qwen3", '<tool_call>{"arguments": {"query": "x"}, "name": "search"}</tool_call>', '{"query": "x"}'),
        ("qwen3", '<tool_call>{"name":"search","arguments":{"query":"x"}}</tool_call>', '{"query":"x"}'),
        ("llama3_1", '{"name": "search", "parameters": {"query":  "x"}}', '{"query":  "x"}'),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query":"x"}, "id": "a"}]', '{"query":"x"}'),
        ("mistral", '[TOOL_CALLS]{"name": "search", "arguments": {"query":"x"}}', '{"query":"x"}'),
        ("mistral_args", '[TOOL_CALLS]search[CALL_ID]abc[ARGS]{"query":"x"}', '{"query":"x"}'),
        ("mistral_args", '[TOOL_CALLS]search{"query":"x"}', '{"query":"x"}'),
        ("qwen3_5_think", "<tool_call><function=search><parameter=query>x</parameter></function></tool_call>", '{"query": "x"}'),
        ("glm4moe", "<tool_call>search<arg_key>query</arg_key><arg_value>x</arg_value></tool_call>", '{"query": "x"}'),
        ("gptoss", '<|channel|>commentary to=functions.search<|message|> {"query":"x"} <|call|>', '{"query":"x"}'),
    ],
)  # fmt: skip
def test_the_arguments_text_is_the_one_that_the_model_wrote(tokenizers, name, text, arguments):
    (found,) = both(tokenizers[name], name, text).written
    assert (found.call.name, found.arguments) == ("search", arguments)


def test_a_call_that_cannot_be_read_keeps_its_text_and_the_next_one_is_read(tokenizers):
    good = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
    bad, after = both(tokenizers["qwen3"], "qwen3", f"<tool_call>\nnothing\n</tool_call>\n{good}").written
    assert bad.text == "<tool_call>\nnothing\n</tool_call>" and after.call.arguments == {"query": "x"}
    tagged = "<tool_call>\n<function=search>\n<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>"
    bad, after = both(tokenizers["qwen3_5_think"], "qwen3_5_think", f"<tool_call>hm</tool_call>{tagged}").written
    assert bad.text == "<tool_call>hm</tool_call>" and after.call.arguments == {"limit": 3}
    for cut in (5, 20, 40):
        (found,) = both(tokenizers["qwen3"], "qwen3", good[:-cut]).written
        assert found.call.problem and found.text == good[:-cut].strip()


@settings(max_examples=60, derandomize=True)
@given(data=st.data(), name=st.sampled_from(list(CALL_FAMILIES)))
def test_any_reply_is_read_the_same_whole_and_as_it_comes(tokenizers, data, name):
    texts = [
        '{"name": "f", "arguments": {',
        '"a": 1}}',
        '{"name": "f", "parameters": {}}',
        "f",
        "}",
        '"',
        ";",
        ",",
        "[",
        "]",
        "\n",
    ]
    texts += [
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        " to=functions.f",
        '{"a": "b"}',
        "<think>",
        "ü😀",
    ]
    marks = list(reply_form(tokenizers[name], call_template(name), True).ids.values())
    parts = data.draw(st.lists(st.sampled_from(texts + marks), max_size=16))
    both(tokenizers[name], name, "", parts)


def test_mistrals_reasoning_is_between_special_tokens_of_its_own(tmp_path, bpe_tokenizer):
    write_call_family(tmp_path, "mistral_args", bpe_tokenizer)
    place = tmp_path / "tokenizer_config.json"
    settings = json.loads(place.read_text())
    first = max(map(int, settings["added_tokens_decoder"])) + 1
    for number, name in enumerate(("[THINK]", "[/THINK]"), first):
        settings["added_tokens_decoder"][str(number)] = {"content": name, "special": True, "normalized": False}
    place.write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    call = '[TOOL_CALLS]search[ARGS]{"query": "rain"}'
    for begin, prompt, said in (
        ("[THINK]", "[/INST]", "It rains."),
        ("", "[/INST][THINK]", ""),
        ("", "[/INST]", "No."),
    ):
        reasoning = "I look." if begin or prompt.endswith("[THINK]") else ""
        text = f"{begin}{reasoning}{'[/THINK]' if reasoning else ''}{said}{call}</s>"
        form = reply_form(tokenizer, call_template("mistral_args"), tools=True)
        tokens, before = tokenizer.encode(text), tokenizer.encode(prompt)
        whole = read_reply(form, tokenizer, tokens, before, {tokenizer.eos_id})
        assert (whole.reasoning, whole.content) == (reasoning, said)
        assert whole.calls == (ToolCall("search", {"query": "rain"}),)
        reader = ReplyReader(form, StreamDecoder(tokenizer), before)
        pieces = [piece for token in tokens for piece in reader.push(token)] + reader.finish()
        assert "".join(piece.text for piece in pieces if piece.section == "reasoning") == reasoning
        assert reader.parts().content == said
    grammar = reply_grammar(form, "", None, CallRule([(Tool("search"), True)], True, False))
    marks = [f"<[{first + number}]>" for number in range(2)]
    assert all(mark in grammar for mark in marks) and "<think>" not in grammar


@pytest.mark.parametrize("name", CALL_FAMILIES)
def test_a_damaged_call_is_read_the_same_whole_and_as_it_comes(tokenizers, name):
    text, draw = written(name, "", CALLS[: 3 if CALL_FAMILIES[name].many else 1]), random.Random(3)
    tokens = tokenizers[name].encode(text)
    form = reply_form(tokenizers[name], call_template(name), True).with_tools(TOOLS)
    for _ in range(40):
        some = list(tokens)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(some))
            some[place : place + draw.randint(0, 2)] = draw.choices(tokens, k=draw.randint(0, 2))
        whole = read_reply(form, tokenizers[name], some)
        reader = ReplyReader(form, StreamDecoder(tokenizers[name]))
        pieces = [piece for token in some for piece in reader.push(token)] + reader.finish()
        joined = {}
        for part in (part for piece in pieces for part in piece.calls if part.call >= 0):
            joined[part.call] = joined.get(part.call, "") + part.name + part.arguments
        assert reader.parts() == whole
        fine = [each.call.name + each.arguments for each in whole.written if not each.call.problem]
        assert [each for each in fine if each not in joined.values()] == []
