"""Grammars of replies: what random draws under their masks make of every family's calls, reasoning and content."""

import json
import random

import jsonschema
import numpy as np
import pytest

from lockstep.data import load_tokenizer
from lockstep.data.replies import PLAIN, read_reply, reply_form
from lockstep.generate.grammars import Grammars
from lockstep.generate.server.call_rules import Tool
from lockstep.generate.server.reply_grammar import CallRule, ContentRule, reply_grammar
from tests.data.call_templates import CALL_FAMILIES, call_template, write_call_family

PARAMETERS = {
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string", "maxLength": 12},
            "limit": {"type": "integer", "minimum": 1, "maximum": 50},
            "kind": {"enum": ["a b", "c"]},
        },
        "required": ["query", "limit"],
        "additionalProperties": False,
    },
    "look_up": {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
            "deep": {"$ref": "#/$defs/Deep"},
        },
        "required": ["deep"],
        "additionalProperties": False,
        "$defs": {
            "Deep": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}},
                "required": ["on"],
                "additionalProperties": False,
            }
        },
    },
}
TOOLS = [Tool(name, "", schema, strict=True) for name, schema in PARAMETERS.items()]


@pytest.fixture(scope="module")
def families(tmp_path_factory, bpe_tokenizer):
    """By name: (tokenizer, form, grammars)."""
    found = {}
    for name in CALL_FAMILIES:
        folder = tmp_path_factory.mktemp("grammars") / name
        write_call_family(folder, name, bpe_tokenizer)
        tokenizer = load_tokenizer(folder)
        form = reply_form(tokenizer, call_template(name), True).with_tools([tool.described() for tool in TOOLS])
        found[name] = tokenizer, form, Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_id])
    return found


def drawn(family, grammar, seed, prefer=(), length=800):
    """Tokens drawn evenly from those that the grammar allows, or one of `prefer` where it is."""
    tokenizer, _, grammars = family
    matcher, draw, tokens = grammars.matcher(grammar), random.Random(seed), []
    bits = np.zeros((tokenizer.vocab_size + 31) // 32, np.int32)
    for _ in range(length):
        matcher.fill_mask(bits)
        assert not matcher.problem, matcher.problem
        allowed = [token for token in range(tokenizer.vocab_size) if bits[token // 32] >> (token % 32) & 1]
        assert allowed, "the grammar ends without an end"
        wanted = [token for token in prefer if token in allowed]
        token = draw.choice(wanted if wanted and draw.random() < 0.3 else allowed)
        if token == tokenizer.eos_id:
            return tokens
        tokens.append(token)
        assert matcher.accept(token)
    return None


def closing(family):
    """Tokens that end texts: without a preference for them, random texts are endless."""
    tokenizer = family[0]
    names = ("</think>", "</arg_value>", "<|end|>")
    ends = [tokenizer.vocabulary()[name] for name in names if name in tokenizer.vocabulary()]
    return [*ends, tokenizer.eos_id, *tokenizer.encode("\n"), *tokenizer.encode('"'), *tokenizer.encode("</parameter>")]


@pytest.mark.parametrize("name", CALL_FAMILIES)
@pytest.mark.parametrize("many", [True, False])
def test_forced_calls_always_parse_and_fit_their_schemas(families, name, many):
    tokenizer, form, _ = family = families[name]
    rule = CallRule([(tool, True) for tool in TOOLS], required=True, many=many)
    grammar = reply_grammar(form, "", None, rule)
    seen = set()
    for seed in range(12):
        tokens = drawn(family, grammar, seed, closing(family))
        if tokens is None:
            continue
        parts = read_reply(form, tokenizer, [*tokens, tokenizer.eos_id], (), {tokenizer.eos_id})
        assert parts.calls and not parts.content.strip(), tokenizer.decode(tokens)
        assert many or len(parts.calls) == 1
        for call in parts.calls:
            assert not call.problem, (call.problem, tokenizer.decode(tokens))
            jsonschema.validate(dict(call.arguments), PARAMETERS[call.name])
            seen.add(call.name)
    assert seen == set(PARAMETERS), seen


@pytest.mark.parametrize("name", CALL_FAMILIES)
def test_a_named_call_is_of_that_tool_alone_and_its_arguments_any_object_if_the_schema_is_not_enforced(families, name):
    tokenizer, form, _ = family = families[name]
    for enforced in (True, False):
        grammar = reply_grammar(form, "", None, CallRule([(TOOLS[1], enforced)], required=True, many=False))
        found = [tokens for seed in range(8) if (tokens := drawn(family, grammar, seed, closing(family))) is not None]
        assert found
        for tokens in found:
            (call,) = read_reply(form, tokenizer, [*tokens, tokenizer.eos_id], (), {tokenizer.eos_id}).calls
            assert call.name == "look_up" and not call.problem, (call.problem, tokenizer.decode(tokens))


@pytest.mark.parametrize("name", [name for name in CALL_FAMILIES if name != "llama3_1"])
def test_strict_tools_leave_text_free_and_bind_a_call_once_it_begins(families, name):
    tokenizer, form, grammars = families[name]
    grammar = reply_grammar(form, "", None, CallRule([(tool, True) for tool in TOOLS], required=False, many=True))
    begin = {
        "qwen3": '<tool_call>\n{"name": "search", "arguments": {"query": "x", "limit": ',
        "qwen3_5_think": "<tool_call>\n<function=search>\n<parameter=query>\nx\n</parameter>\n<parameter=limit>\n",
        "glm4moe": "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>x</arg_value>\n"
        "<arg_key>limit</arg_key>\n<arg_value>",
        "mistral": '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "x", "limit": ',
        "mistral_args": '[TOOL_CALLS]search[ARGS]{"query": "x", "limit": ',
        "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x", "limit": ',
        "deepseek_fenced": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        '{"query": "x", "limit": ',
        "gptoss": '<|channel|>commentary to=functions.search json<|message|>{"query": "x", "limit": ',
    }[name]
    free = "<|channel|>final<|message|>any { text" if name == "gptoss" else "any { text"
    for text, following, fits in [(free, "", True), (begin, "7", True), (begin, "x", False), (begin, "0", False)]:
        matcher = grammars.matcher(grammar)
        assert all(map(matcher.accept, tokenizer.encode(text))), text
        assert all(map(matcher.accept, tokenizer.encode(following))) is fits, (text, following)


def test_a_call_of_llama3_is_bound_too_and_text_that_is_no_call_is_free(families):
    tokenizer, form, grammars = families["llama3_1"]
    grammar = reply_grammar(form, "", None, CallRule([(tool, True) for tool in TOOLS], required=False, many=True))
    called = '{"name": "search", "parameters": {"query": "x", "limit": '
    for text, fits in [("so { x", True), (called + "7", True), (called + "x", False), ('{"a": 1}', False)]:
        matcher = grammars.matcher(grammar)
        assert all(map(matcher.accept, tokenizer.encode(text))) is fits, text


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
CONTENTS = [
    (ContentRule("json", SCHEMA), lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    (ContentRule("regex", text=r"[ab]{2}/c"), {f"{a}{b}/c" for a in "ab" for b in "ab"}.__contains__),
    (ContentRule("choice", choices=("yes", 'n"o\n')), {"yes", 'n"o\n'}.__contains__),
    (ContentRule("lark", text='start: "x" y\ny: "1" | "2" y'), lambda text: text[0] == "x" and text[-1] == "1"),
]


@pytest.mark.parametrize(("rule", "fits"), CONTENTS, ids=[rule.kind for rule, _ in CONTENTS])
@pytest.mark.parametrize(
    ("name", "after"), [("qwen3", ""), ("qwen3", "<think>"), ("qwen3", "</think>"), ("gptoss", "")]
)
def test_the_content_after_the_reasoning_follows_the_grammar(families, name, after, rule, fits):
    tokenizer, _, _ = family = families[name]
    form = reply_form(tokenizer, call_template(name))
    grammar = reply_grammar(form, after, rule, None)
    prompt = (
        tokenizer.encode(f"{after}\n") if after else tokenizer.encode("<|start|>assistant" if name == "gptoss" else "?")
    )
    reasoned = []
    for seed in range(12):
        tokens = drawn(family, grammar, seed, closing(family))
        if tokens is not None:
            parts = read_reply(form, tokenizer, [*tokens, tokenizer.eos_id], prompt, {tokenizer.eos_id})
            assert fits(parts.content), (parts, tokenizer.decode(tokens))
            reasoned.append(bool(parts.reasoning))
    assert reasoned
    if after:
        assert any(reasoned) is (after == "<think>")


def test_a_completions_text_follows_the_grammar_from_its_beginning(families):
    family = families["qwen3"]
    for rule, fits in CONTENTS:
        tokens = drawn(family, reply_grammar(PLAIN, "", rule, None), 1, closing(family))
        assert fits(family[0].decode(tokens))


def test_content_or_calls_with_both(families):
    tokenizer, form, grammars = families["qwen3"]
    grammar = reply_grammar(form, "", ContentRule("json", SCHEMA), CallRule([(TOOLS[0], True)], False, True))
    for text, fits in [
        ('{"a": 4}', True),
        ("free", False),
        ('<tool_call>\n{"name": "search"', True),
        ('{"name"', False),
    ]:
        matcher = grammars.matcher(grammar)
        assert all(map(matcher.accept, tokenizer.encode(text))) is fits, text
