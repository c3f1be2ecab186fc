# ruff: noqa: E501
"""Content that must follow a schema, a regular expression, a choice or a grammar; and schemas that are hostile."""

import itertools
import json
import re
import threading
import time

import jsonschema
import pytest

from lockstep.generate import grammars
from lockstep.generate.server import schema_check
from lockstep.generate.server.schema_check import control_characters, is_endless, miscounted_keys, unknown_keyword

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 90}, "k": {"enum": ["a", "bb"]}},
    "required": ["n", "k"],
    "additionalProperties": False,
}


def of_schema(schema, **rest):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **rest}}}


WAYS = [
    (of_schema(SCHEMA, strict=True), lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    ({"structured_outputs": {"json": SCHEMA}}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, lambda text: "k" in json.loads(text)),
    ({"structured_outputs": {"regex": r"[ab]{3}-\d"}}, re.compile(r"[ab]{3}-\d").fullmatch),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}.__contains__),
    ({"structured_outputs": {"grammar": 'start: "x" y\ny: "1" | "2" y'}}, re.compile("x2*1").fullmatch),
]


@pytest.mark.parametrize(("body", "fits"), WAYS, ids=range(len(WAYS)))
def test_chats_and_completions_follow_what_they_must_be(server, body, fits):
    for seed in range(3):
        answer = server.chat("hi", seed=seed, max_tokens=100, **body).json()["choices"][0]
        assert fits(answer["message"]["content"]) and answer["finish_reason"] == "stop"
        answer = server.complete(prompt="hi", seed=seed, max_tokens=100, **body).json()["choices"][0]
        assert fits(answer["text"])


def test_json_object_is_any_object_and_the_logprobs_are_those_of_the_whole_vocabulary(server):
    body = {"response_format": {"type": "json_object"}, "max_tokens": 40, "temperature": 0, "logprobs": True}
    answer = server.chat("hi", return_token_ids=True, **body).json()["choices"][0]
    assert answer["message"]["content"].startswith("{")
    free = server.chat("hi", max_tokens=1, temperature=0, logprobs=True, top_logprobs=20).json()["choices"][0]
    first = answer["logprobs"]["content"][0]
    listed = {each["token"]: each["logprob"] for each in free["logprobs"]["content"][0]["top_logprobs"]}
    assert first["logprob"] < max(listed.values()) and answer["truncated_logprobs"][0] > first["logprob"]


def refused(server, **body):
    answer = server.chat("hi", **body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


ENDLESS = {
    "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "required": ["next"]}},
    "$ref": "#/$defs/Node",
}
OVERLAPPING = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
DEEP = {"type": "string"}
for _ in range(80):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "string", "format": "regex"}, "regex"),
        ({"type": "object", "properties": {"a": {"type": "string", "minlength": 3}}}, "properties.a.minlength"),
        (OVERLAPPING, "oneOf"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater than maximum (2)"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "Unsatisfiable"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "Unsatisfiable"),
        ({"$ref": "http://example.com/schema.json"}, "example.com"),
        ({"type": "text"}, "Invalid type: text"),
        (DEEP, "recursion limit"),
        (ENDLESS, "every value would contain another one without end"),
        ({"type": "array", "items": [{"type": "string", "minlength": 3}]}, "items.0.minlength"),
        ({"type": "array", "additionalItems": {"minlength": 3}}, "additionalItems.minlength"),
        ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}, "minProperties is not enforced"),
        ({"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False, "minProperties": 2}, "minProperties is"),
        ({"type": "object", "properties": {"a": {"const": "x\x01"}}}, "properties.a.const has control characters"),
        ({"type": "string", "pattern": r"^a\x01$"}, "pattern has control characters"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)a"}}}, "the pattern is '(?=a)a'"),
        ({"anyOf": [{"type": "string", "pattern": "^b"}, {"type": "string", "pattern": r"(a)\1"}]}, r"the pattern is '(a)\\1'"),
        ({"type": "object", "patternProperties": {r"\ba": {}}}, r"the pattern is '\\ba'"),
        ({"anyOf": []}, "Unsatisfiable"),
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_that_is_not_enforced_or_not_satisfiable_is_refused_with_the_reason(server, schema, said):
    for body, param in (
        (of_schema(schema), "response_format"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs"),
    ):
        error = refused(server, **body)
        assert said in error["message"] and (error["param"], error["code"]) == (param, "unsupported_schema"), error


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "json_schema.schema is missing"),
        (of_schema([]), "response_format.json_schema.schema must be a JSON schema, an object"),
        ({**of_schema({}), "structured_outputs": {"regex": "a"}}, "give one"),
        ({"structured_outputs": {}}, "exactly one of json, regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one of json, regex"),
        ({"structured_outputs": {"regex": "("}}, "regex parse error"),
        ({"structured_outputs": {"grammar": "x"}}, "the grammar cannot be used"),
        ({"structured_outputs": {"choice": []}}, "choice must be 1 to 4096 strings"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs.whitespace_pattern is not supported here"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not JSON"),
        ({"guided_regex": "a"}, 'guided_regex is not supported here; send structured_outputs: {"regex": …}'),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_about_it_is_said_by_name(server, body, said):
    assert said in refused(server, **body)["message"]


def test_as_many_choices_as_are_allowed_can_be_followed(server):
    choices = [f"{number:04} is it" for number in range(4096)]
    answer = server.chat("hi", seed=1, max_tokens=40, structured_outputs={"choice": choices}).json()["choices"][0]
    assert answer["message"]["content"] in choices


AMBIGUOUS = {"structured_outputs": {"grammar": 'start: a\na: a a | "x" | /[^y]/ | '}}


def test_a_grammar_whose_steps_take_too_long_is_ended_and_others_are_not(server, monkeypatch):
    free = {"max_tokens": 60, "seed": 3, "structured_outputs": {"regex": "[a-z]*"}}
    # By a clock that stands still, no step takes any time.
    monkeypatch.setattr(grammars.time, "thread_time", lambda: 0.0)
    assert server.chat("hi", max_tokens=5, seed=1, **AMBIGUOUS).status_code == 200
    seconds = itertools.count()
    monkeypatch.setattr(grammars.time, "thread_time", lambda: float(next(seconds)))
    assert server.chat("hi", **free).json()["error"]["code"] == "grammar_failed"
    monkeypatch.undo()
    answer = server.chat("hi", max_tokens=300, seed=1, temperature=2, **AMBIGUOUS)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "grammar_failed" and "take too long" in error["message"]
    assert server.chat("hi", **free).status_code == 200
    server.wait_until(server.all_pages_free)


def test_the_automaton_of_a_regular_expression_or_grammar_is_limited(server):
    doubled = "start: A13\nA0: /x?/\n" + "\n".join(f"A{n + 1}: A{n} A{n}" for n in range(13))
    error = refused(server, structured_outputs={"grammar": doubled})
    assert error["code"] == "unsupported_schema" and "too big" in error["message"]
    for outputs in ({"regex": "x*" * 2049}, {"grammar": "start: /" + "x" * 2**14 + "/"}):
        assert "characters" in refused(server, structured_outputs=outputs)["message"]
    answer = server.chat("hi", max_tokens=3, structured_outputs={"regex": "ab" * 2048})
    assert answer.status_code == 200, answer.text[:300]


def test_annotations_are_no_restrictions_and_are_accepted(server):
    annotated = {**SCHEMA, "$schema": "http://json-schema.org/draft-07/schema#", "title": "A", "x-order": 1}
    annotated["properties"] = {
        "n": {**SCHEMA["properties"]["n"], "default": 4, "description": "d"},
        "k": {**SCHEMA["properties"]["k"], "examples": ["a"], "nullable": False},
    }
    assert unknown_keyword(annotated) == ""
    content = server.chat("hi", seed=1, max_tokens=100, **of_schema(annotated)).json()["choices"][0]["message"][
        "content"
    ]
    jsonschema.validate(json.loads(content), SCHEMA)
    named = {"type": "object", "properties": {"minlength": {"type": "string"}, "$defs": {"type": "string"}}}
    assert unknown_keyword(named) == "", "a property may have any name"


def test_a_schema_of_very_many_references_is_not_looked_into(monkeypatch):
    looked = []
    monkeypatch.setattr(schema_check, "referred", lambda name, schema: looked.append(name))
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(8000)}
    assert not is_endless({"$ref": "#/$defs/d0", "$defs": chain}) and not looked


def test_a_schema_of_itself_that_can_end_is_not_endless():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    maybe = {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
    nullable = {"type": "object", "properties": {"next": maybe}, "required": ["next"]}
    tree = {
        "type": "object",
        "properties": {"parts": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
        "required": ["parts"],
    }
    for one in (node, nullable, tree):
        assert not is_endless({"$defs": {"Node": one}, "$ref": "#/$defs/Node"})
    tree["properties"]["parts"]["minItems"] = 1
    assert is_endless({"$defs": {"Node": tree}, "$ref": "#/$defs/Node"})
    assert not is_endless(_doubling(60))


SELF = {"$ref": "#"}
WITHOUT_END = {
    "additional": {"type": "object", "additionalProperties": SELF, "minProperties": 1},
    "additional of allOf": {"type": "object", "allOf": [{"additionalProperties": SELF, "minProperties": 1}]},
    "pattern": {
        "type": "object",
        "patternProperties": {"^a$": SELF},
        "minProperties": 1,
        "additionalProperties": False,
    },
    "required": {"type": "object", "required": ["a"], "additionalProperties": SELF},
    "optional": {"type": "object", "properties": {"a": SELF}, "minProperties": 1, "additionalProperties": False},
    "prefix": {"type": "array", "prefixItems": [{"type": "integer"}, SELF], "minItems": 2, "items": False},
    "tuple": {"type": "array", "items": [SELF], "minItems": 1},
    "additional items": {"type": "array", "items": [{}], "additionalItems": SELF, "minItems": 2},
}
WITH_END = {
    "no key": {"type": "object", "additionalProperties": SELF},
    "no long pattern": {"type": "object", "patternProperties": {"(a+)+$": SELF}, "required": ["a" * 60 + "!"]},
    "another key": {
        "type": "object",
        "properties": {"a": SELF, "b": {}},
        "minProperties": 1,
        "additionalProperties": False,
    },
    "any key": {"type": "object", "properties": {"a": SELF}, "minProperties": 1},
    "required": {"type": "object", "required": ["a"], "properties": {"a": {}}, "additionalProperties": SELF},
    "first": {"type": "array", "prefixItems": [{"type": "integer"}, SELF], "minItems": 1},
    "no items": {"type": "array", "items": [SELF], "minItems": 0},
    "string": {"additionalProperties": SELF, "minProperties": 1},
    "no names": {"type": ["object", ["a"]], "required": [["a"]], "additionalProperties": SELF},
}


@pytest.mark.parametrize("name", WITHOUT_END)
def test_values_that_must_contain_another_are_endless(name):
    assert is_endless(WITHOUT_END[name])


@pytest.mark.parametrize("name", WITH_END)
def test_values_that_may_contain_another_are_not_endless(name):
    assert not is_endless(WITH_END[name])


def test_one_key_beside_the_required_ones_is_counted(server):
    schema = {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}, "minProperties": 1}
    answer = server.chat("hi", max_tokens=60, seed=1, **of_schema({**schema, "maxProperties": 1})).json()
    assert len(json.loads(answer["choices"][0]["message"]["content"])) == 1
    assert miscounted_keys({**schema, "required": ["a"], "minProperties": 2}) == ""
    closed = {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False}
    assert miscounted_keys(closed) == ""
    assert miscounted_keys({"items": {**closed, "additionalProperties": True}}) == "items.minProperties"


def test_control_characters_are_found_where_they_must_be_written():
    for pattern in (r"^[\x00-\x1f]*$", r"^[^\x00]+$", r"\\x01", r"[a\]\x01]", r"\n\t\x20"):
        assert control_characters({"pattern": pattern}) == "", pattern
    for pattern in (r"\x1b\[0m", "\x07", r"\u0007", r"\cA", r"a\0"):
        assert control_characters({"items": {"pattern": pattern}}) == "items.pattern", pattern
    assert control_characters({"enum": ["a", {"b": ["\x7f"]}]}) == "enum"
    assert control_characters({"const": "\b\f\n\r\t"}) == ""


def _doubling(levels):
    definitions = {"a0": {"type": "string"}}
    for level in range(1, levels):
        part = {"$ref": f"#/$defs/a{level - 1}"}
        definitions[f"a{level}"] = {"type": "object", "properties": {"x": part, "y": part}, "required": ["x", "y"]}
    return {"$defs": definitions, "$ref": f"#/$defs/a{levels - 1}"}


def _wide(number, key="k"):
    return {"anyOf": [{"type": "object", "properties": {f"{key}{n}": {"type": "string"}}} for n in range(number)]}


HOSTILE = {
    "doubling": _doubling(25),
    "wide": _wide(2000),
    "huge enum": {"enum": [f"value {number}" for number in range(10_000)]},
    "alternatives": {"allOf": [_wide(4, f"k{n}_") for n in range(10)]},
    "pattern": {"type": "string", "pattern": "(a|b)*a(a|b){200}c((a{1,50}){1,50}){1,50}"},
    "long": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "array": {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "minItems": 10**5}, "minItems": 10**5},
    "multiple": {"type": "integer", "multipleOf": 7919 * 104729},
}  # fmt: skip


def test_hostile_schemas_are_refused_or_answered_while_the_server_stays_healthy(server):
    waits, ended = [], threading.Event()

    def watch():
        with server.http() as client:
            while not ended.is_set():
                began = time.perf_counter()
                assert client.get("/health").status_code == 200
                waits.append(time.perf_counter() - began)
                time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for name, schema in HOSTILE.items():
            answer = server.chat("hi", max_tokens=8, seed=1, **of_schema(schema))
            assert answer.status_code in (200, 400), (name, answer.text)
            if answer.status_code == 400:
                assert answer.json()["error"]["code"] in ("unsupported_schema", "grammar_failed"), (name, answer.text)
    finally:
        ended.set()
        watching.join()
    # The issue asks for 100 ms; the median is below it on a machine that others share.
    assert sorted(waits)[len(waits) // 2] < 0.1, sorted(waits)[-5:]
    assert server.chat("hi", max_tokens=2).status_code == 200
