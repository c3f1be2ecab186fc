# ruff: noqa: E501
"""Tools in chats: what the prompt shows of them, and calls in the answers, whole and streamed, by the official client."""

import json

import jsonschema
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from transformers.utils.chat_template_utils import render_jinja_template

from tests.data.call_templates import CALL_FAMILIES, PARAMETERS, call_template

ASK = [{"role": "user", "content": "hi"}]
END = {"ignore_eos": True}
"""For what is said in place of the model, which may end earlier."""
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}
    for name, schema in PARAMETERS.items()
]


def chat(server, messages=ASK, **body):
    answer = server.chat(messages, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def refused(server, messages=ASK, **body):
    answer = server.chat(messages, **body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def streamed(server, messages=ASK, **options):
    """(content, calls, finish reason, chunks) of a streamed answer."""
    with server.openai() as client:
        chunks = list(client.chat.completions.create(model="small", messages=messages, stream=True, **options))
    content, calls, reason = "", {}, None
    for chunk in chunks:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or ():
            if part.index not in calls:
                assert part.id and part.type == "function" and part.function.name
                calls[part.index] = {"id": part.id, "name": part.function.name, "arguments": ""}
            else:
                assert part.id is None and part.function.name is None
            calls[part.index]["arguments"] += part.function.arguments or ""
    return content, list(calls.values()), reason, chunks


@pytest.mark.parametrize("name", CALL_FAMILIES)
def test_tools_and_history_are_rendered_as_transformers_renders_them(serving, name):
    server, family = serving(name), CALL_FAMILIES[name]
    arguments = {"query": "x", "limit": 3}
    text = name.startswith("deepseek")
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "search", "arguments": json.dumps(arguments)}}
    shown = {"name": "search", "arguments": json.dumps(arguments) if text else arguments}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "4"}
    sent = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    written = {
        "role": "assistant",
        "content": "" if name == "glm4moe" else None,
        "tool_calls": [{**call, "function": shown}],
    }
    if name == "gptoss":
        written["content"] = ""
    (expected,), _ = render_jinja_template(
        [[*ASK, written, result]],
        tools=TOOLS,
        chat_template=call_template(name),
        add_generation_prompt=True,
        bos_token=family.special[0],
        eos_token=family.special[-1],
    )
    prompt = chat_prompt(server, sent, tools=TOOLS)
    assert prompt == server.service.tokenizer.encode(expected) and "search" in expected


def chat_prompt(server, messages, **body):
    answer = server.chat(messages, max_tokens=1, return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt_token_ids"]


def test_tools_that_may_not_be_called_are_not_shown(serving):
    server = serving("qwen3")
    shown = chat_prompt(server, ASK, tools=TOOLS)
    assert chat_prompt(server, ASK, tools=TOOLS, tool_choice="none") == chat_prompt(server, ASK) != shown
    assert chat_prompt(server, ASK, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True) == shown


CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "ü 1", "limit":  3}}\n</tool_call>'
OTHER = '<tool_call>\n{"arguments": {"on": true}, "name": "look_up"}\n</tool_call>'


def test_calls_are_apart_from_the_content_and_streamed_in_parts_that_join_to_the_same(serving, say):
    server, said = serving("qwen3"), ["I look.\n", CALL, "\n", OTHER, "<|im_end|>"]
    say(server, said, ends=True)
    choice = chat(server, **END, tools=TOOLS)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "I look."
    calls = [(call["type"], call["function"]) for call in message["tool_calls"]]
    assert calls == [
        ("function", {"name": "search", "arguments": '{"query": "ü 1", "limit":  3}'}),
        ("function", {"name": "look_up", "arguments": '{"on": true}'}),
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)
    say(server, said, ends=True)
    content, grown, reason, chunks = streamed(server, tools=TOOLS, extra_body=END)
    assert (content, reason) == ("I look.", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in grown] == [tuple(f.values()) for _, f in calls]
    parts = [chunk for chunk in chunks if chunk.choices[0].delta.tool_calls]
    assert len(parts) > 6, "the first call's arguments come in parts"


def test_a_message_of_only_calls_has_no_content_and_one_call_alone_if_so_requested(serving, say):
    server = serving("qwen3")
    for options, count in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        say(server, [CALL, OTHER, "<|im_end|>"], ends=True)
        message = chat(server, **END, tools=TOOLS, **options)["message"]
        assert message["content"] is None and len(message["tool_calls"]) == count
        say(server, [CALL, OTHER, "<|im_end|>"], ends=True)
        assert len(streamed(server, tools=TOOLS, extra_body=END, **options)[1]) == count


def test_a_call_that_cannot_be_read_is_content(serving, say):
    server, bad = serving("qwen3"), "<tool_call>\nnothing\n</tool_call>"
    say(server, [bad, "<|im_end|>"], ends=True)
    choice = chat(server, **END, tools=TOOLS)
    assert choice["message"]["content"] == bad and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    say(server, [bad, "<|im_end|>"], ends=True)
    assert streamed(server, tools=TOOLS, extra_body=END)[:3] == (bad, [], "stop")
    say(server, [bad, "\n", CALL, "<|im_end|>"], ends=True)
    choice = chat(server, **END, tools=TOOLS)
    assert choice["message"]["content"] == bad and len(choice["message"]["tool_calls"]) == 1


def test_without_tools_text_that_looks_like_a_call_is_content(serving, say):
    server = serving("qwen3")
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        say(server, [CALL, "<|im_end|>"], ends=True)
        assert chat(server, **END, **options)["message"]["content"] == CALL


def test_a_stop_string_after_a_call_ends_the_answer_and_the_call_stays(serving, say):
    server = serving("qwen3")
    said = [CALL, "\nObservation: 4 and more"]
    for stream in (False, True):
        script = say(server, said)
        options = dict(tools=TOOLS, stop=["Observation:", "Calling tools:"], max_tokens=len(script))
        if stream:
            content, calls, reason, _ = streamed(server, extra_body=END, **options)
            arguments = calls[0]["arguments"]
        else:
            choice = chat(server, **END, **options)
            content, reason = choice["message"]["content"] or "", choice["finish_reason"]
            arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert (content, reason, arguments) == ("", "tool_calls", '{"query": "ü 1", "limit":  3}')


def test_gpt_oss_calls_in_a_channel_have_the_reasoning_apart(serving, say):
    server = serving("gptoss")
    said = "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant"
    said += ' to=functions.search<|channel|>commentary json<|message|>{"query": "x"}<|call|>'
    for stream in (False, True):
        say(server, [said], ends=True)
        if stream:
            content, calls, reason, _ = streamed(server, tools=TOOLS, extra_body=END)
            assert (content, reason, calls[0]["arguments"]) == ("", "tool_calls", '{"query": "x"}')
        else:
            message = chat(server, **END, tools=TOOLS)["message"]
            assert message["reasoning_content"] == "hmm" and message["content"] is None
            assert message["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "x"}'}


def test_mistrals_ids_are_those_that_its_template_takes_back(serving, say):
    server = serving("mistral")
    say(server, ['[TOOL_CALLS] [{"name": "search", "arguments": {"query": "x"}}]', "</s>"], ends=True)
    message = chat(server, **END, tools=TOOLS)["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    assert chat_prompt(server, [*ASK, message, result], tools=TOOLS)


BOUNDED = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                    "kind": {"enum": ["a", "b c"]},
                },
                "required": ["limit", "kind"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]


@pytest.mark.parametrize("name", CALL_FAMILIES)
def test_forced_calls_of_a_model_with_random_weights_fit_their_schemas(serving, name):
    server = serving(name)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in BOUNDED}
    named = {"type": "function", "function": {"name": "search"}}
    for seed, choice in enumerate(["required", named, "required"]):
        options = dict(
            tools=BOUNDED, tool_choice=choice, seed=seed, max_tokens=300, parallel_tool_calls=False,
            temperature=0.7, stop=["Observation:", "Calling tools:"],
        )  # fmt: skip
        found = chat(server, **options)
        calls = found["message"].get("tool_calls", [])
        if not calls:
            assert found["finish_reason"] == "length" and THINKS[name], found
            continue
        assert found["finish_reason"] == "tool_calls" and len(calls) == 1
        function = calls[0]["function"]
        assert choice == "required" or function["name"] == "search"
        jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])
        content, grown, reason, _ = streamed(server, **options)
        assert [(each["name"], each["arguments"]) for each in grown] == [(function["name"], function["arguments"])]
        assert (content, reason) == (found["message"]["content"] or "", "tool_calls")


THINKS = {name: name in ("qwen3", "qwen3_5_think", "glm4moe", "gptoss") for name in CALL_FAMILIES}


class Search(BaseModel):
    """Looks things up."""

    limit: int
    on: bool


def test_the_official_clients_parse_reads_calls_and_content_as_models(serving):
    server = serving("mistral_args")
    with server.openai() as client:
        tools = [pydantic_function_tool(Search)]
        asked = dict(model="small", messages=ASK, max_tokens=200, seed=3, temperature=0.7)
        found = client.chat.completions.parse(**asked, tools=tools, tool_choice="required", parallel_tool_calls=False)
        (call,) = found.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Search)
        found = client.chat.completions.parse(**asked, response_format=Search)
        assert isinstance(found.choices[0].message.parsed, Search)
        with client.chat.completions.stream(**asked, response_format=Search) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == found.choices[0].message.parsed


def function(name, **rest):
    return {"type": "function", "function": {"name": name, **rest}}


STRICT = {"type": "object", "properties": {"a": {"type": "string", "uniqueItems": True}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("body", "said", "code"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name is missing", None),
        ({"tools": [function("a b")]}, "tools.0.function.name is 'a b'", None),
        ({"tools": [function("")]}, "1 to 64 letters", None),
        ({"tools": [function("f"), function("f")]}, "2 tools have the name 'f'", None),
        ({"tools": [function(f"f{n}") for n in range(1025)]}, "tools must be a list of up to 1024 tools", None),
        ({"tools": [function("f", parameters={"type": "string"})]}, "has the type 'string'", None),
        ({"tools": [function("f", parameters=[])]}, "parameters must be a JSON schema of an object", None),
        ({"tools": [{"type": "web_search"}]}, "other kinds of tools are not supported", None),
        ({"tools": [function("f", parameter={"a": 1})]}, "tools.0.function.parameter is not supported here. Did you", "unknown_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "names 'g'", None),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice must be none, auto, required, or", None),
        ({"tool_choice": "required"}, "there are no tools", None),
        ({"functions": [{"name": "f"}]}, "functions is not supported here; send tools", "unsupported_parameter"),
        ({"tools": [function("f", parameters=STRICT, strict=True)], "tool_choice": "required"}, "uniqueItems", "unsupported_schema"),
        ({"tools": [function("f", parameters=STRICT, strict=True)]}, "uniqueItems", "unsupported_schema"),
    ],
    ids=str,
)  # fmt: skip
def test_tools_that_are_wrong_are_refused_by_name(serving, body, said, code):
    error = refused(serving("qwen3"), **body)
    assert said in error["message"] and error["code"] == code, error
    assert error["param"] in ("tools", "tool_choice", "functions")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f"}}]}, "arguments is missing"),
        ({"role": "assistant", "tool_calls": [function("f", arguments="{")]}, "not JSON"),
        ({"role": "assistant", "tool_calls": [function("f", arguments="[]")]}, "not of an object"),
        ({"role": "user", "content": "x", "tool_calls": [function("f", arguments="{}")]}, "only the assistant's messages"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call is not supported here"),
        ({"role": "tool", "tool_call_id": "x"}, "content must be a string"),
    ],
)  # fmt: skip
def test_a_history_that_is_wrong_is_refused_by_name(serving, message, said):
    error = refused(serving("qwen3"), [*ASK, message])
    assert said in error["message"] and error["param"] == "messages", error


def test_a_tool_whose_schema_cannot_be_enforced_is_called_anyway_unless_it_is_strict(serving):
    server = serving("mistral_args")
    loose = [function("f", parameters=STRICT)]
    (call,) = chat(server, tools=loose, tool_choice="required", seed=1, max_tokens=400, parallel_tool_calls=False)[
        "message"
    ].get("tool_calls") or [None]
    assert call is None or isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"])
def test_a_call_of_an_endless_schema_is_any_object_unless_it_is_strict(serving, choice):
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}
    cycle = {"$ref": "#/$defs/N", "$defs": {"N": {"$ref": "#/$defs/N"}}}
    server = serving("mistral_args")
    for schema in ({**node, "$defs": {"N": node}}, cycle):
        ask = {"tools": [function("f", parameters=schema)], "tool_choice": choice}
        bias = {str(server.service.tokenizer.encode("}")[-1]): 8}
        (called,) = chat(server, **ask, max_tokens=100, seed=1, logit_bias=bias, parallel_tool_calls=False)["message"][
            "tool_calls"
        ]
        assert isinstance(json.loads(called["function"]["arguments"]), dict)
        # Another tool whose schema cannot be enforced changes nothing about it.
        other = function("g", parameters={"type": "object", "not": {"required": ["a"]}})
        chat(server, tools=[*ask["tools"], other], tool_choice=choice, max_tokens=100, seed=1, logit_bias=bias)
        error = refused(server, tools=[function("f", parameters=schema, strict=True)], tool_choice=choice)
        assert "cannot be satisfied" in error["message"]


def test_many_tools_are_rendered(serving):
    tools = [function(f"f{number}", parameters={"type": "object", "properties": {}}) for number in range(64)]
    assert b"f63" in serving("qwen3").service.tokenizer.decode(chat_prompt(serving("qwen3"), ASK, tools=tools)).encode()


def test_a_model_whose_template_shows_no_tools_or_writes_unknown_calls_says_so(server, tmp_path, chat_folder):
    error = refused(server, tools=TOOLS)
    assert "does not show tools" in error["message"] and error["code"] == "tools_not_supported"
    assert server.chat("hi", tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200
    history = [*ASK, {"role": "assistant", "tool_calls": [function("f", arguments="{}")]}]
    assert "does not show tool calls" in refused(server, history)["message"]
