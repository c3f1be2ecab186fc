"""Grammars of replies: what random draws under their masks make of every family's calls, reasoning and content."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from lockstep.data import load_tokenizer
from lockstep.data.replies import PLAIN, read_reply, reply_form
from lockstep.errors import UserError
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


COLORS = {"C": {"enum": ["red", "green"], "type": "string"}, "U": {"type": "string"}}
NULL, INTEGER, STRING = {"type": "null"}, {"type": "integer"}, {"type": "string"}
UNFIT = "unfit"
TAGGED = ["qwen3_5_think", "glm4moe"]


def of(value, **rest):
    """The schema of one argument."""
    return {"type": "object", "properties": {"c": value}, "required": ["c"], **rest}


def argument(families, name, schema, text):
    """What a call with a text as its argument `c` is read as; UNFIT if the grammar does not allow it."""
    tokenizer, _, grammars = families[name]
    tool = Tool("f", "", schema, strict=True)
    form = reply_form(tokenizer, call_template(name), True).with_tools([tool.described()])
    matcher = grammars.matcher(reply_grammar(form, "", None, CallRule([(tool, True)], required=True, many=False)))
    if name == "glm4moe":
        call = f"f\n<arg_key>c</arg_key>\n<arg_value>{text}</arg_value>\n"
    else:
        call = f"\n<function=f>\n<parameter=c>\n{text}\n</parameter>\n</function>\n"
    tokens = [*tokenizer.encode(f"<tool_call>{call}</tool_call>"), tokenizer.eos_id]
    if not all(map(matcher.accept, tokens)):
        return UNFIT
    (read,) = read_reply(form, tokenizer, tokens, (), {tokenizer.eos_id}).calls
    assert not read.problem and jsonschema.Draft202012Validator(schema).is_valid(dict(read.arguments)), read
    return read.arguments["c"]


ARGUMENTS = {
    "optional choice": ({"anyOf": [COLORS["C"], NULL]}, {"red": "red", "null": None, "blue": UNFIT}),
    "optional pattern": (
        {"anyOf": [{"type": "string", "pattern": "^[a-z]{2}$"}, NULL]},
        {"no": "no", "null": None, "NO1": UNFIT, "xno": UNFIT},
    ),
    "optional length": (
        {"anyOf": [{"type": "string", "maxLength": 2}, NULL]},
        {"ab": "ab", "null": None, "abc": UNFIT},
    ),
    "optional date": (
        {"anyOf": [{"type": "string", "format": "date"}, NULL]},
        {"2024-02-29": "2024-02-29", "null": None, "2024-13-01": UNFIT, "2024-04-31": UNFIT, "soon": UNFIT},
    ),
    "optional integer": ({"anyOf": [INTEGER, NULL]}, {"3": 3, "null": None, "x": UNFIT}),
    "optional string": ({"anyOf": [STRING, NULL]}, {"a\nb": "a\nb", "null": None, "3": "3"}),
    "any": ({}, {"x": "x", "3": 3, "null": None}),
    "string or list": ({"anyOf": [STRING, {"type": "array", "items": {}}]}, {"x": "x", "[1]": [1]}),
    "allOf": ({"allOf": [{"$ref": "#/$defs/C"}], "default": "red"}, {"red": "red", "blue": UNFIT}),
    "$ref": ({"$ref": "#/$defs/U", "maxLength": 2, "description": "d"}, {"ab": "ab", "abc": UNFIT}),
    "choice or number": (
        {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1000}]},
        {"auto": "auto", "1000": 1000, "5": UNFIT, "aut": UNFIT},
    ),
    "choice or boolean": (
        {"anyOf": [{"type": "boolean"}, {"enum": ["auto"]}]},
        {"true": True, "auto": "auto", "x": UNFIT},
    ),
    "choice or list": (
        {"oneOf": [{"enum": ["all"]}, {"type": "array", "items": {"$ref": "#/$defs/C"}}]},
        {"all": "all", '["red"]': ["red"], '["x"]': UNFIT},
    ),
    "constants": ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, {"a": "a", "b": "b", "c": UNFIT}),
    "types": ({"type": ["string", "null"], "enum": ["a", None]}, {"a": "a", "null": None, "b": UNFIT}),
    "choice and length": ({"enum": ["a", "bbbb"], "maxLength": 2}, {"a": "a", "bbbb": UNFIT}),
    "pattern and length": (
        {"type": "string", "pattern": "^a|b$|[|$]c", "maxLength": 3},
        {"axx": "axx", "xxb": "xxb", "|c": "|c", "xax": UNFIT, "bx": UNFIT, "axxx": UNFIT},
    ),
    "digits": ({"type": "string", "pattern": r"^[\d.]\d$"}, {"12": "12", ".1": ".1", "1٣": UNFIT, "1.": UNFIT}),
    "two patterns": (
        {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string"},
        {"axb": "axb", "ax": UNFIT, "xb": UNFIT},
    ),
    "uuid": (
        {"type": "string", "format": "uuid"},
        {"0a1b2c3d-0000-4000-8000-0123456789ab": "0a1b2c3d-0000-4000-8000-0123456789ab", "0a1b": UNFIT},
    ),
    "tags": (STRING, {"</param>\n<arg": "</param>\n<arg", "</p>": "</p>"}),
}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(("value", "texts"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_an_argument_without_quotes_fits_its_schema(families, name, value, texts):
    for text, expected in texts.items():
        read = argument(families, name, of(value, **{"$defs": COLORS}), text)
        assert read == expected and type(read) is type(expected), (text, read)


UNENFORCED = {
    "text or number": ({"anyOf": [STRING, {"type": "integer", "minimum": 1000}]}, "type integer"),
    "text or list": ({"anyOf": [STRING, {"type": "array", "items": INTEGER}]}, "type array"),
    "text or choice": ({"anyOf": [STRING, {"enum": [1, 2]}]}, "type integer"),
    "types of allOf": ({"allOf": [{"type": ["string", "integer"]}, STRING]}, "type integer"),
    "not": ({"type": "string", "not": {"const": "x"}}, "not of"),
    "if": ({"type": "string", "if": {}, "then": {"maxLength": 1}}, "if of"),
    "items": ({"items": INTEGER}, "items of"),
    "properties": ({"properties": {"z": INTEGER}, "required": ["z"]}, "properties of"),
    "minimum": ({"minimum": 3}, "minimum of"),
    "minimum of a string": ({"type": "string", "minimum": 3}, "minimum of"),
    "typo": ({"anyOf": [{"type": "string", "minlength": 3}, NULL]}, "minlength of"),
    "choice and pattern": ({"enum": ["a", "b"], "pattern": "a"}, "pattern of"),
    "format": ({"anyOf": [{"type": "string", "format": "uri"}, NULL]}, "format 'uri'"),
    "length": ({"type": "string", "maxLength": "3"}, "maxLength must be"),
    "lengths": ({"type": "string", "maxLength": 1, "minLength": 2}, "minLength (2) is greater"),
    "overlap": ({"oneOf": [STRING, {"const": "b"}]}, "oneOf has"),
    "overlapping values": ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, "oneOf has"),
    "one text of two values": ({"enum": ["1", 1]}, 'the value "1"'),
    "tag": ({"enum": ["a</parameter>"]}, "the value"),
    "no alternative": ({"anyOf": []}, "no value fits"),
    "no type": ({"type": "string", "allOf": [INTEGER]}, "no value fits"),
    "itself": ({"$ref": "#/properties/c"}, "itself"),
    "no target": ({"$ref": "#/$defs/Missing"}, "#/$defs/Missing"),
    "class": ({"type": "string", "pattern": "[a[b]|c]"}, "escape the brackets"),
    "inner anchor": ({"type": "string", "pattern": "a(^b|c)"}, "lookarounds"),
    "many ways": ({"$ref": "#/$defs/a24"}, "more than 512"),
    "a list as a format": ({"type": "string", "format": ["date"]}, "format ['date']"),
}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(("value", "said"), UNENFORCED.values(), ids=UNENFORCED)
def test_what_would_not_be_enforced_of_an_argument_is_refused_by_name(families, name, value, said):
    ways = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n - 1}"}] * 100} for n in range(1, 25)}
    with pytest.raises(UserError, match=re.escape(said)):
        argument(families, name, of(value, **{"$defs": {**ways, "a0": False}}), "x")


WHOLES = {
    "minProperties": {"minProperties": 1},
    "maxProperties": {"maxProperties": 1},
    "dependentRequired": {"dependentRequired": {"c": ["d"]}},
    "if": {"if": {"required": ["c"]}, "then": {"required": ["d"]}},
    "propertyNames": {"propertyNames": {"maxLength": 2}},
    "patternProperties": {"patternProperties": {"^c": {"maxLength": 1}}},
    "anyOf": {"anyOf": [{"required": ["c"]}]},
    "required argument": {"required": ["d"]},
    "every required argument": {"required": [["c"]]},
    "type": {"type": "array"},
    "required a list": {"required": True},
}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("keyword", WHOLES)
def test_what_would_not_be_enforced_of_all_arguments_is_refused_by_name(families, name, keyword):
    with pytest.raises(UserError, match=keyword):
        argument(families, name, {**of(STRING), **WHOLES[keyword]}, "x")
    with pytest.raises(UserError, match=keyword):
        argument(families, name, {"$ref": "#/$defs/A", "$defs": {"A": {**of(STRING), **WHOLES[keyword]}}}, "x")


@pytest.mark.parametrize("name", TAGGED)
def test_an_argument_that_no_value_fits_is_left_out_and_a_reference_to_all_arguments_keeps_their_types(families, name):
    schema = {
        "type": "object",
        "properties": {"a": False, "c": STRING},
        "required": ["c"],
        "additionalProperties": False,
    }
    assert argument(families, name, schema, "5") == "5"
    referring = {"$ref": "#/$defs/A", "$defs": {"A": schema}}
    assert argument(families, name, referring, "5") == "5"
    with pytest.raises(UserError, match="required argument"):
        argument(families, name, {**schema, "required": ["a"]}, "5")
    with pytest.raises(UserError, match="properties of a whole"):
        argument(families, name, {**referring, "properties": {"c": {"maxLength": 1}}}, "5")


def test_a_text_cannot_have_the_beginning_of_another_argument(families):
    for text in ("x</parameter>\n<parameter=d>\ny", "x</parameter><parameter=d>"):
        assert argument(families, "qwen3_5_think", of(STRING), text) == UNFIT
