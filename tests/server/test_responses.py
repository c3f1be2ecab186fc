# ruff: noqa: E501
"""`/v1/responses`, by the official client and as it is: items, streams, stored responses and refusals."""

import json
import re
import time
from functools import partial

import openai
import pytest
from pydantic import BaseModel

from lockstep.generate.server import responses_store
from lockstep.generate.server.protocol import Message
from lockstep.generate.server.responses_store import StoredResponses
from tests.data.call_templates import PARAMETERS
from tests.server.conftest import running_server
from tests.server.scripted import SAID, THOUGHT, save_thinking

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "ü 1", "limit":  3}}\n</tool_call>'
OTHER = '<tool_call>\n{"arguments": {"on": true}, "name": "look_up"}\n</tool_call>'
TOOLS = [{"type": "function", "name": name, "parameters": schema} for name, schema in PARAMETERS.items()]
END = {"ignore_eos": True}
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory, bpe_tokenizer):
    """A server of a model that answers everything with the same thought and words, in Qwen3's form."""
    folder = tmp_path_factory.mktemp("thinking") / "qwen3"
    script = save_thinking(folder, bpe_tokenizer)
    with running_server(folder, model_name="thinking", dtype="float32") as running:
        running.script = script
        yield running


def post(server, **body):
    with server.http() as client:
        return client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 128, **body})


def respond(server, **body):
    answer = post(server, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server, **body):
    answer = post(server, **body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def streamed(server, **body):
    """The data of each event of a stream; its name is their type, and they are numbered."""
    text = post(server, **body, stream=True).text
    events = []
    for number, event in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = re.fullmatch(r"event: (\S+)\ndata: (.*)", event).groups()
        events.append(json.loads(data))
        assert events[-1]["type"] == name and events[-1]["sequence_number"] == number
    return events


def without_ids(response):
    """A response without what differs between two of them."""
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {**response, "output": items, "id": "", "created_at": 0, "completed_at": 0}


def test_an_answer_has_reasoning_and_text_as_items_and_counts_the_tokens_of_both(thinking):
    with thinking.openai() as client:
        answer = client.responses.create(model="thinking", input="hi", temperature=0, instructions="Be short.")
    thought, message = answer.output
    assert thought.type == "reasoning" and thought.summary == [] and thought.content[0].text == THOUGHT
    assert message.role == "assistant" and message.content[0].annotations == [] and answer.output_text == SAID
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert answer.instructions == "Be short." and answer.temperature == 0 and answer.store
    reasoning = len(thinking.service.tokenizer.encode(THOUGHT))
    assert answer.usage.output_tokens == len(thinking.script)
    assert answer.usage.output_tokens_details.reasoning_tokens == reasoning
    chat = thinking.chat([{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}], max_tokens=1)
    assert answer.usage.input_tokens == chat.json()["usage"]["prompt_tokens"]


def test_an_answer_that_reaches_its_limit_is_incomplete_whole_and_streamed(thinking):
    for tokens, kinds in ((3, ["reasoning"]), (len(thinking.script) - 3, ["reasoning", "message"])):
        options = dict(temperature=0, max_output_tokens=tokens)
        answer = respond(thinking, **options)
        assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["type"] for item in answer["output"]] == kinds
        assert [item["status"] for item in answer["output"]] == [*["completed"] * (len(kinds) - 1), "incomplete"]
        last = streamed(thinking, **options)[-1]
        assert last["type"] == "response.incomplete" and without_ids(last["response"]) == without_ids(answer)


def test_a_stream_ends_with_the_response_that_a_request_without_one_gets(thinking):
    options = dict(temperature=0, include=[LOGPROBS], top_logprobs=2)
    events = streamed(thinking, **options)
    assert [event["type"].removeprefix("response.") for event in events if "delta" not in event] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == SAID and len(deltas) > 1
    response = events[-1]["response"]
    assert without_ids(response) == without_ids(respond(thinking, **options))
    (part,) = response["output"][1]["content"]
    assert part["logprobs"] == [entry for event in deltas for entry in event["logprobs"]]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in response["output"]]


def test_log_probabilities_are_those_of_the_texts_tokens_in_a_chat(thinking):
    chat = thinking.chat("hi", temperature=0, logprobs=True, top_logprobs=3).json()["choices"][0]
    of_text = chat["logprobs"]["content"][-1 - len(SAID) : -1]  # each character a token; the last one ends the answer
    answer = respond(thinking, temperature=0, include=[LOGPROBS], top_logprobs=3)
    assert answer["output"][1]["content"][0]["logprobs"] == of_text
    assert bytes(b for entry in of_text for b in entry["bytes"]).decode().strip() == SAID
    assert respond(thinking, temperature=0)["output"][1]["content"][0]["logprobs"] == []


def test_the_official_client_reads_a_stream(thinking):
    with thinking.openai() as client:
        with client.responses.stream(model="thinking", input="hi", temperature=0) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert final.output_text == SAID and final.output[0].content[0].text == THOUGHT
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


class Answer(BaseModel):
    ok: bool
    kind: str


def test_the_official_client_parses_structured_output(thinking, say):
    said = ["<think>", "Hm.", "</think>", '{"ok": true, "kind": "x"}', "<|im_end|>"]
    with thinking.openai() as client:
        ask = dict(model="thinking", input="hi", text_format=Answer)
        say(thinking, said, ends=True)
        assert client.responses.parse(**ask).output_parsed == Answer(ok=True, kind="x")
        say(thinking, said, ends=True)
        with client.responses.stream(**ask) as stream:
            assert stream.get_final_response().output_parsed == Answer(ok=True, kind="x")


@pytest.mark.parametrize(
    "format", [{"type": "json_object"}, {"type": "json_schema", "name": "a", "schema": {"enum": [{"a": 1}]}}]
)
def test_the_text_follows_its_format(serving, format):
    answer = respond(serving("mistral"), text={"format": format}, max_output_tokens=400, seed=1, top_k=5)
    if format["type"] == "json_schema":
        assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": 1}
    else:
        assert answer["output"][0]["content"][0]["text"].startswith("{")
    assert answer["text"]["format"] == format


def test_calls_are_items_whole_and_streamed(serving, say):
    server, said = serving("qwen3"), ["I look.\n", CALL, "\n", OTHER, "<|im_end|>"]
    say(server, said, ends=True)
    whole = respond(server, tools=TOOLS, **END)
    text, *calls = whole["output"]
    assert text["content"][0]["text"] == "I look." and [call["type"] for call in calls] == ["function_call"] * 2
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("search", '{"query": "ü 1", "limit":  3}'),
        ("look_up", '{"on": true}'),
    ]
    assert len({call["call_id"] for call in calls}) == 2 and whole["status"] == "completed"
    assert [tool["name"] for tool in whole["tools"]] == list(PARAMETERS)
    say(server, said, ends=True)
    events = streamed(server, tools=TOOLS, **END)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    grown = {}
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            grown.setdefault(event["item_id"], []).append(event["delta"])
        elif event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == "".join(grown[event["item_id"]]) and event["name"] in PARAMETERS
    assert len(grown) == 2 and len(next(iter(grown.values()))) > 3, "the arguments come in parts"
    say(server, said, ends=True)
    one = respond(server, tools=TOOLS, parallel_tool_calls=False, **END)
    assert [item["type"] for item in one["output"]] == ["message", "function_call"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look_up"}])
def test_a_call_is_forced(serving, choice):
    answer = respond(serving("mistral"), tools=TOOLS, tool_choice=choice, max_output_tokens=400, seed=2, top_k=5)
    if answer["status"] == "completed":
        assert {item["type"] for item in answer["output"]} == {"function_call"}
    assert answer["tool_choice"] == choice


def test_only_the_allowed_tools_are_shown(serving, rendered):
    server = serving("qwen3")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "search"}]}
    ((_, values),) = rendered(server, lambda: respond(server, tools=TOOLS, tool_choice=allowed, max_output_tokens=1))
    assert [tool["function"]["name"] for tool in values["tools"]] == ["search"]


@pytest.fixture
def rendered(monkeypatch):
    """rendered(server, act): the messages and values that the template was given."""

    def of(server, act):
        seen = []
        render = type(server.service.template).render

        def record(messages, **values):
            seen.append((messages, values))
            return render(server.service.template, messages, **values)

        with monkeypatch.context() as patched:
            patched.setattr(server.service.template, "render", record)
            act()
        return seen

    return of


ITEMS = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "input_text", "text": "What"}, {"type": "input_text", "text": "now?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
    {
        "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "search", "arguments": '{"query": "a"}'},
    {"type": "function_call", "call_id": "call_2", "name": "search", "arguments": '{"query": "b"}', "status": None},
    {"type": "function_call_output", "call_id": "call_1", "output": "4"},
    {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "5"}]},
    {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "So."}], "encrypted_content": "x"},
    {"role": "assistant", "content": "9"},
    {"type": "message", "role": "user", "content": "Thanks"},
]  # fmt: skip


def call_of(number, query):
    function = {"name": "search", "arguments": json.dumps({"query": query})}
    return {"id": f"call_{number}", "type": "function", "function": function}


def test_items_are_the_messages_of_a_chat(serving, rendered):
    server = serving("qwen3")
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "now?"}]},
        {
            "role": "assistant", "content": "I look.", "reasoning_content": "Look.",
            "tool_calls": [call_of(1, "a"), call_of(2, "b")],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
        {"role": "tool", "tool_call_id": "call_2", "content": "5"},
        {"role": "assistant", "content": "9", "reasoning_content": "So."},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    of_items = rendered(server, lambda: respond(server, input=ITEMS, max_output_tokens=1))
    of_chat = rendered(server, lambda: server.chat(chat, max_tokens=1))
    assert of_items == of_chat and len(of_items) == 1


def test_a_conversation_continues_from_a_stored_response(serving, rendered, say):
    server = serving("qwen3")
    say(server, ["<think>\n", "Hm.", "\n</think>\n\n", CALL, "<|im_end|>"], ends=True)
    with server.openai() as client:
        ask = dict(model="small", tools=TOOLS)
        first = client.responses.create(input="hi", instructions="Not kept.", extra_body=END, **ask)
        (call,) = [item for item in first.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}

        def by_id():
            client.responses.create(input=[result], previous_response_id=first.id, max_output_tokens=1, **ask)

        def by_items():
            sent = [{"role": "user", "content": "hi"}, *first.output, result]
            client.responses.create(input=sent, max_output_tokens=1, store=False, **ask)

        continued = rendered(server, by_id)
        assert continued == rendered(server, by_items) and "Hm." in str(continued) and "Not kept." not in str(continued)
        assert client.responses.retrieve(first.id).output == first.output
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match="Previous response") as unknown:
            by_id()
        assert unknown.value.code == "previous_response_not_found" and unknown.value.param == "previous_response_id"


def test_a_stored_conversation_has_all_turns_but_no_call_that_was_cut_off(serving, rendered, say):
    server = serving("qwen3")
    first = respond(server, input="one", max_output_tokens=1)
    second = respond(server, input="two", previous_response_id=first["id"], max_output_tokens=1)
    say(server, [CALL], ends=False)
    cut = dict(input="three", previous_response_id=second["id"], tools=TOOLS, **END, max_output_tokens=24)
    last = streamed(server, **cut)[-1]["response"]
    assert last["status"] == last["output"][-1]["status"] == "incomplete" and last["output"][-1]["arguments"]
    ((messages, _),) = rendered(server, lambda: respond(server, input="four", previous_response_id=last["id"]))
    assert [message["content"] for message in messages if message["role"] == "user"] == ["one", "two", "three", "four"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3 + ["user"]
    assert not any("tool_calls" in message for message in messages)


def test_a_streamed_response_is_stored_and_one_that_asks_for_it_is_not(thinking):
    last = streamed(thinking, temperature=0)[-1]["response"]
    unstored = respond(thinking, store=False)
    assert unstored["store"] is False
    with thinking.http() as client:
        assert client.get(f"/v1/responses/{last['id']}").json() == last
        assert client.get(f"/v1/responses/{unstored['id']}").status_code == 404
        assert client.get(f"/v1/responses/{last['id']}?stream=true").status_code == 400


def test_stored_responses_are_limited_in_number_bytes_and_time(monkeypatch):
    monkeypatch.setattr(responses_store, "MOST", 3)
    now = [0.0]
    stored = StoredResponses(lambda: now[0])
    said = (Message(role="user", content="x"),)
    for number in range(4):
        stored.put(str(number), "{}", said)
    assert [number for number in range(4) if stored.get(str(number))] == [1, 2, 3]
    stored.put("large", "x" * (responses_store.MOST_BYTES - 2**14), said)
    assert stored.get("large") and stored.get("3")
    stored.put("more", "x" * 2**15, said)
    assert stored.get("more") and not stored.get("large") and not stored.get("3")
    now[0] = responses_store.SECONDS + 1
    assert stored.get("more") is None
    stored.put("too large", "x" * (responses_store.MOST_BYTES + 1), said)
    assert stored.get("too large") is None and stored._bytes == 0


def test_efforts_of_reasoning_are_told_to_templates_that_read_them_or_refused(serving, rendered):
    """By chats too, which have another field for them."""
    for family, effort, expected in (
        ("gptoss", "low", {"reasoning_effort": "low"}),
        ("gptoss", "medium", {"reasoning_effort": "medium"}),
        ("gptoss", "none", "the model always reasons; send low, medium or high"),
        ("qwen3", "none", {"enable_thinking": False}),
        ("qwen3", "medium", {}),
        ("qwen3", "low", "it can only turn reasoning off: send 'none', or nothing, or enable_thinking in"),
        ("mistral", "none", {}),
        ("mistral", "high", "the model does not reason"),
    ):
        server = serving(family)
        asked = {
            "reasoning.effort": partial(post, server, reasoning={"effort": effort}, max_output_tokens=1),
            "reasoning_effort": partial(server.chat, reasoning_effort=effort, max_tokens=1),
        }
        for field, ask in asked.items():
            answers = []
            found = rendered(server, lambda ask=ask, answers=answers: answers.append(ask()))
            if isinstance(expected, dict):
                assert [values for _, values in found] == [expected], (family, effort)
            else:
                error = answers[0].json()["error"]
                assert error["message"].startswith(f"{field}: this model's chat template has no way to ask for")
                assert expected in error["message"] and error["param"] == field.partition(".")[0] and not found
    with serving("qwen3").http() as client:
        chat = {"messages": [{"role": "user", "content": "x"}]}
        lengths = [
            client.post("/tokenize", json=chat | fields).json()["count"]
            for fields in ({}, {"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}})
        ]
    assert lengths[0] < lengths[1] == lengths[2]
    error = serving("qwen3").chat(reasoning_effort="most").json()["error"]["message"]
    assert error == "reasoning_effort must be none, minimal, low, medium, high, xhigh or max"


FUNCTION = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": None}, "input", "input"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [3]}, "input", "input.0: Input should be"),
        ({"input": [{"role": "user"}]}, "input", "input.0.content is missing"),
        ({"input": [{"role": "king", "content": "x"}]}, "input", "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input.0.content.0.type must be input_text"),
        ({"input": [{"role": "user", "content": "x", "weight": 2}]}, "input", "input.0.weight is not supported"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "input.0 is of the type 'web_search_call'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input.0 is of the type 'item_reference'"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", "input.0.call_id is missing"),
        ({"input": None}, "input", "input must be a string, or a list of up to 4096 items"),
        ({"input": [None]}, "input", "input.0: Input should be an object"),
        ({"previous_response_id": "r" * 200}, "previous_response_id", "must be a string of up to 128 characters"),
        ({"text": {"format": {"type": "json_schema", "shema": {"a": 1}}}}, "text", 'Did you mean "schema"?'),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}]}, "input", "are not JSON"),
        ({"input": "word " * 9000}, "input", "tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "'resp_1' not found"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0 is 'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools", "tools.0.name is ''"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools", "2 tools have the name 'f'"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.name is missing"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "file_search"}}, "tool_choice", "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}}, "tool_choice", "'g'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "text.format.schema is missing"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text", "not"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity"),
        ({"include": ["all"]}, "include", "'all'"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs include"),
        ({"truncation": "auto"}, "truncation", "truncation must be disabled"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning", "reasoning.summary"),
        ({"reasoning": {"efort": "low"}}, "reasoning", "reasoning.efort"),
        ({"background": True}, "background", "background is not supported"),
        ({"conversation": "conv_1"}, "conversation", "send previous_response_id"),
        ({"prompt": {"id": "x"}}, "prompt", "prompt is not supported"),
        ({"max_tool_calls": 3}, "max_tool_calls", "max_tool_calls is not supported"),
        ({"max_tokens": 3}, "max_tokens", "send max_output_tokens"),
        ({"messages": []}, "messages", "send input"),
        ({"response_format": {"type": "text"}}, "response_format", "text: {"),
        ({"n": 2}, "n", "n is not supported"),
        ({"return_token_ids": True}, "return_token_ids", "return_token_ids is not supported"),
        ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options", "always has usage"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "maximum context length"),
        ({"instuctions": "x"}, "instuctions", "instructions"),
    ],
)  # fmt: skip
def test_what_is_invalid_or_not_supported_is_refused_by_name(serving, body, param, message):
    error = refused(serving("qwen3"), **body)
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    assert message in error["message"], error["message"]


def test_fields_without_effect_are_accepted(thinking):
    answer = respond(
        thinking, temperature=0, include=["reasoning.encrypted_content"], metadata={"a": "b"}, user="x", tools=[], n=1,
        service_tier="auto", truncation="disabled", background=False, text={"format": {"type": "text"}, "verbosity": "medium"},
        prompt_cache_key="x", safety_identifier="x", reasoning={"effort": None}, tool_choice="auto", conversation=None,
        parallel_tool_calls=True, max_tool_calls=None, stream=False, previous_response_id=None, max_output_tokens=None,
    )  # fmt: skip
    assert answer["output"][1]["content"][0]["text"] == SAID and answer["metadata"] == {"a": "b"}


def test_an_error_within_a_stream_is_an_event_and_the_response_has_failed(chat_folder, monkeypatch):
    with running_server(chat_folder, request_seconds=2) as server:
        step = server.engine.step
        monkeypatch.setattr(server.engine, "step", lambda: time.sleep(0.02) or step())
        events = streamed(server, input="hi", max_output_tokens=400, **END)
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        error, failed = events[-2:]
        assert error["code"] == "deadline" and "took longer" in error["message"] and error["param"] is None
        assert failed["response"]["status"] == "failed" and failed["response"]["error"]["code"] == "server_error"
        with server.http() as client:
            assert client.get(f"/v1/responses/{failed['response']['id']}").status_code == 404
