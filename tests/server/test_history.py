"""Calls and results in a history, over all APIs: a prompt shows each result with its call, or is refused."""

import pytest

from tests.data.call_templates import PARAMETERS

ASK = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "Does it.", "parameters": PARAMETERS["search"]},
}
PATHS = ("/v1/chat/completions", "/tokenize", "/v1/responses", "/v1/messages")
KINDS = ("chats", "tokenize", "responses", "messages")


def call(call_id, arguments='{"query": "a"}'):
    return {"id": call_id, "type": "function", "function": {"name": "search", "arguments": arguments}}


def result(call_id, text):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def conversation(*parts):
    """Of calls (their ids in a tuple) and results (the id of each), as messages of a chat."""
    messages = [ASK]
    for part in parts:
        if isinstance(part, tuple):
            calls = [call(call_id, f'{{"query": "of {call_id}"}}') for call_id in part]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            messages.append(result(part, f"for {part}"))
    return messages


def body_of(path, parts):
    """The same in the form of each route."""
    if path == "/v1/responses":
        items = [ASK]
        for part in parts:
            if isinstance(part, tuple):
                items += (
                    {"type": "function_call", "call_id": i, "name": "search", "arguments": f'{{"query": "of {i}"}}'}
                    for i in part
                )
            else:
                items.append({"type": "function_call_output", "call_id": part, "output": f"for {part}"})
        return {"input": items, "max_output_tokens": 1}
    if path == "/v1/messages":
        messages = [ASK]
        for part in parts:
            if isinstance(part, tuple):
                blocks = [{"type": "tool_use", "id": i, "name": "search", "input": {"query": f"of {i}"}} for i in part]
                messages.append({"role": "assistant", "content": blocks})
            else:
                block = {"type": "tool_result", "tool_use_id": part, "content": f"for {part}"}
                messages.append({"role": "user", "content": [block]})
        return {"messages": messages, "max_tokens": 1}
    return {"messages": conversation(*parts)} | ({"max_tokens": 1} if path != "/tokenize" else {})


@pytest.fixture
def prompts(monkeypatch):
    """prompts(server, path, body): (the answer, the texts of the prompts)."""
    from lockstep.generate.server import chats

    own, texts = chats.encode, []

    async def seen(service, texts_of_request, field):
        texts.extend(texts_of_request)
        return await own(service, texts_of_request, field)

    monkeypatch.setattr(chats, "encode", seen)

    def of(server, path, body):
        texts.clear()
        with server.http() as client:
            return client.post(path, json=body), list(texts)

    return of


def refused(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("path", PATHS, ids=KINDS)
def test_results_are_shown_in_the_order_of_their_calls(serving, prompts, path):
    server = serving("qwen3")
    _, (expected,) = prompts(server, path, body_of(path, [("a", "b", "c"), "a", "b", "c", ("d",), "d"]))
    _, (prompt,) = prompts(server, path, body_of(path, [("a", "b", "c"), "c", "a", "b", ("d",), "d"]))
    assert prompt == expected
    assert prompt.index("for a") < prompt.index("for b") < prompt.index("for c") < prompt.index("for d")


@pytest.mark.parametrize("parts", [["x"], [("a",), "x"], [("a",), "a", "a"], [("a",), "a", "x"]], ids=str)
@pytest.mark.parametrize("path", PATHS, ids=KINDS)
def test_a_result_that_answers_no_call_is_refused(serving, prompts, path, parts):
    error = refused(prompts(serving("qwen3"), path, body_of(path, parts))[0])
    assert f"of the call '{parts[-1]}' answers no call before it" in error["message"]
    assert path == "/v1/messages" or error["param"] == ("input" if path == "/v1/responses" else "messages")


def test_what_is_no_contradiction_is_accepted(serving, prompts):
    server, path = serving("qwen3"), "/v1/chat/completions"
    late = [*conversation(("a", "b"), "a"), ASK, result("b", "late")]
    nameless = [ASK, {"role": "assistant", "tool_calls": [call(None), call(None)]}, result(None, "1"), result("x", "2")]
    without_ids = [*conversation(("a", "b")), result(None, "1"), result(None, "2")]
    again = conversation(("a",), "a", ("a",), "a")
    for messages in (late, nameless, without_ids, again, conversation(("a", "b"), "b")):
        answer, (prompt,) = prompts(server, path, {"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        results = [message["content"] for message in messages if message["role"] == "tool"]
        assert sorted(prompt.index(text) for text in results) == [prompt.index(text) for text in results]
    error = refused(prompts(server, path, {"messages": [*without_ids, result(None, "3")]})[0])
    assert "result without an id answers no call" in error["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_calls_need_their_results(serving, prompts, path):
    for parts in ([("a",)], [("a", "b"), "a"], [("a",), ("b",), "b"]):
        body = body_of("/v1/messages", parts)
        if isinstance(parts[-1], tuple):
            body["messages"].append(ASK)
        if path.endswith("tokens"):
            del body["max_tokens"]
        error = refused(prompts(serving("qwen3"), path, body)[0])
        assert "has no result right after it" in error["message"]


def test_results_are_checked_over_a_stored_conversation(serving, prompts, say):
    server, path = serving("qwen3"), "/v1/responses"
    tool = {"type": "function", **TOOL["function"]}
    say(server, ['<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>', "<|im_end|>"], ends=True)
    first = prompts(server, path, {"input": "hi", "tools": [tool], "ignore_eos": True})[0].json()
    (called,) = first["output"]
    body = {"previous_response_id": first["id"], "max_output_tokens": 1}
    output = {"type": "function_call_output", "call_id": called["call_id"], "output": "4"}
    answer, (prompt,) = prompts(server, path, body | {"input": [output]})
    assert answer.status_code == 200 and "4" in prompt
    for items in ([output, output], [output | {"call_id": "x"}]):
        assert "answers no call before it" in refused(prompts(server, path, body | {"input": items})[0])["message"]


@pytest.mark.parametrize("name", ["gptoss", "llama3_1"])
@pytest.mark.parametrize("path", PATHS, ids=KINDS)
def test_templates_of_single_calls_show_each_call_with_its_result(serving, prompts, path, name):
    server = serving(name)
    assert not server.service.call_layout.parallel
    answer, texts = prompts(server, path, body_of(path, [("a", "b"), "b", "a"]))
    assert answer.status_code == 200, answer.text
    places = [texts[0].index(part) for part in ("of a", "for a", "of b", "for b")]
    assert places == sorted(places)
    _, alone = prompts(server, path, body_of(path, [("a",), "a", ("b",), "b"]))
    assert texts == alone


def test_calls_without_results_are_shown_by_templates_of_single_calls(serving, prompts):
    body = body_of("/v1/chat/completions", [("a", "b"), "b"])
    _, (prompt,) = prompts(serving("gptoss"), "/v1/chat/completions", body)
    places = [prompt.index(part) for part in ("of a", "of b", "for b")]
    assert places == sorted(places)


@pytest.mark.parametrize("path", PATHS[:3], ids=KINDS[:3])
@pytest.mark.parametrize("name", ["qwen3", "gptoss", "deepseek_v31"])
def test_half_a_surrogate_pair_within_arguments_is_refused_by_name(serving, prompts, path, name):
    arguments = '{"query": "\\ud83d"}'
    body = body_of(path, [("a",), "a"])
    if path == "/v1/responses":
        body["input"][1]["arguments"] = arguments
    else:
        body["messages"][1]["tool_calls"] = [call("a", arguments)]
    error = refused(prompts(serving(name), path, body)[0])
    assert "\\ud83d, half of a surrogate pair" in error["message"]
    assert error["param"] == ("input" if path == "/v1/responses" else "messages")
