# ruff: noqa: E501
"""Anthropic's own client against a real server: messages whole and streamed, tools, structured output, errors."""

import json

import pytest
from pydantic import BaseModel

from tests.server.conftest import ENGINE, running_server
from tests.server.scripted import SAID, THOUGHT, save_thinking

anthropic = pytest.importorskip("anthropic", minversion="2.14")

ASK = [{"role": "user", "content": "hi"}]
NOT_OF_THE_CLIENT = ("temperature", "top_p", "top_k", "seed", "ignore_eos")
"""Fields of the API or of this server that the client's methods do not take: they go into `extra_body`."""
SEARCH = {
    "name": "search",
    "description": "Does it.",
    "input_schema": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 50}},
        "required": ["query"],
        "additionalProperties": False,
    },
}
LOOK_UP = {"name": "look_up", "input_schema": {"type": "object", "properties": {"on": {"type": "boolean"}}}}
TOOLS = [SEARCH, LOOK_UP]
OPENAI_TOOLS = [
    {"type": "function", "function": {"name": t["name"], "description": t.get("description", ""), "parameters": t["input_schema"]}}
    for t in TOOLS
]  # fmt: skip
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "ü 1", "limit":  3}}\n</tool_call>'
OTHER = '<tool_call>\n{"arguments": {"on": true}, "name": "look_up"}\n</tool_call>'


@pytest.fixture(scope="module")
def thinking(tmp_path_factory, bpe_tokenizer):
    """A server of a model that answers everything with the same thought and words, in Qwen3's form."""
    folder = tmp_path_factory.mktemp("thinking") / "qwen3"
    script = save_thinking(folder, bpe_tokenizer)
    with running_server(folder, model_name="small", dtype="float32") as running:
        running.script = script
        yield running


def connected(server, **options):
    return anthropic.Anthropic(base_url=server.url, **{"api_key": "none", "max_retries": 0, "timeout": 60} | options)


def arguments(messages=ASK, **body):
    """The arguments of the client's methods for a request with these fields."""
    more = {name: body.pop(name) for name in NOT_OF_THE_CLIENT if name in body}
    return dict(model="small", messages=messages, extra_body=more, **{"max_tokens": 100} | body)


def create(server, messages=ASK, **body):
    with connected(server) as client:
        return client.messages.create(**arguments(messages, **body))


def streamed(server, messages=ASK, **body):
    """(the message that the client puts together, the types of the events)."""
    with connected(server) as client, client.messages.stream(**arguments(messages, **body)) as stream:
        events = [event.type for event in stream]
        return stream.get_final_message(), events


def plain(message):
    """What two answers to the same request have in common."""
    return message.model_dump(exclude={"id"}, exclude_none=True)


def post(server, path="/v1/messages", **body):
    with server.http() as client:
        return client.post(path, json=body)


def refused(server, path="/v1/messages", status=400, **body):
    answer = post(server, path, **{"messages": ASK, "max_tokens": 4} | body)
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert set(found) == {"type", "error", "request_id"} and found["type"] == "error"
    assert found["request_id"] == answer.headers["request-id"]
    assert {"type", "message"} <= set(found["error"]) <= {"type", "message", "details"}
    return found["error"]


def test_a_message_has_reasoning_and_text_in_blocks_of_their_own_whole_and_streamed(thinking):
    whole = create(thinking, temperature=0)
    first, second = whole.content
    assert (first.type, first.thinking, second.type, second.text) == ("thinking", THOUGHT, "text", SAID)
    assert first.signature and whole.id.startswith("msg_") and whole.role == "assistant" and whole.model == "small"
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    assert whole.usage.output_tokens == len(thinking.script) and whole.usage.input_tokens > 0
    assert whole._request_id.startswith("req-")
    found, events = streamed(thinking, temperature=0)
    assert plain(found) == plain(whole)
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    assert events.count("thinking") > 1 and events.count("text") >= 1 and events.count("signature") == 1
    assert events.count("content_block_start") == events.count("content_block_stop") == 2


def test_all_events_have_names(thinking):
    with thinking.http() as client:
        body = {"messages": ASK, "max_tokens": 100, "stream": True, "temperature": 0}
        text = client.post("/v1/messages", json=body).text
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_reasons_for_the_end(thinking):
    found = create(thinking, temperature=0, max_tokens=3)
    assert (found.stop_reason, found.usage.output_tokens) == ("max_tokens", 3)
    for stops, end in ((["never", ":4"], "now"), ([":4", "w:"], "no")):
        whole = create(thinking, temperature=0, stop_sequences=stops)
        assert whole.content[-1].text == end and whole.stop_reason == "stop_sequence"
        assert whole.stop_sequence == {"now": ":4", "no": "w:"}[end]
        assert plain(streamed(thinking, temperature=0, stop_sequences=stops)[0]) == plain(whole)
    stopped = create(thinking, temperature=0, stop_sequences=["add"])
    assert [block.type for block in stopped.content] == ["thinking"] and stopped.stop_sequence == "add"


def test_more_tokens_than_the_context_has_end_with_it(server):
    found = create(server, max_tokens=100_000, ignore_eos=True)
    assert found.stop_reason == "model_context_window_exceeded"
    assert found.usage.input_tokens + found.usage.output_tokens == server.service.context


def test_the_answer_is_that_of_the_same_chat(server):
    """The same prompt, and the same draw."""
    messages = [{"role": "user", "content": "What is argparse?"}]
    options = dict(temperature=0.8, top_p=0.9, top_k=20, seed=5, max_tokens=20)
    chat = server.chat([{"role": "system", "content": "Be brief."}, *messages], **options).json()
    for system in ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]):
        found = create(server, messages, system=system, **options)
        assert "".join(block.text for block in found.content) == chat["choices"][0]["message"]["content"]
        assert found.usage.input_tokens == chat["usage"]["prompt_tokens"]


def chat_tokens(server, messages, **body):
    with server.http() as client:
        answer = client.post("/tokenize", json={"messages": messages, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def message_tokens(server, monkeypatch, messages, **body):
    """The prompt that the engine gets."""
    prompts = []
    add = server.engine.add
    with monkeypatch.context() as patched:
        patched.setattr(server.engine, "add", lambda prompt, *rest: (prompts.append(prompt), add(prompt, *rest))[1])
        create(server, messages, **{"max_tokens": 1} | body)
    with connected(server) as client:
        body.pop("max_tokens", None)
        assert client.messages.count_tokens(model="small", messages=messages, **body).input_tokens == len(prompts[0])
    return prompts[0]


def text(said):
    return {"type": "text", "text": said}


def called(call_id, **arguments):
    return {"type": "tool_use", "id": call_id, "name": "search", "input": arguments}


def result(call_id, **rest):
    return {"type": "tool_result", "tool_use_id": call_id, **rest}


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "glm4moe"])
def test_a_history_is_the_prompt_of_the_same_chat(serving, monkeypatch, name):
    server = serving(name)
    history = [
        {"role": "user", "content": [text("hi"), text("there")]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "abc"},
            text("I look."),
            called("toolu_1", query="x"),
        ]},
        {"role": "user", "content": [result("toolu_1", content=[text("4")]), text("more")]},
        {"role": "assistant", "content": [called("toolu_2", query="y"), ]},
        {"role": "user", "content": [result("toolu_2", content="none", is_error=True)]},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip

    def call(call_id, query):
        function = {"name": "search", "arguments": json.dumps({"query": query})}
        return {"id": call_id, "type": "function", "function": function}

    same = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": history[0]["content"]},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "I look.", "tool_calls": [call("toolu_1", "x")]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "search", "content": "4"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": None, "tool_calls": [call("toolu_2", "y")]},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "search", "content": "Error: none"},
        {"role": "user", "content": "and?"},
    ]
    expected = chat_tokens(server, same, tools=OPENAI_TOOLS)
    assert message_tokens(server, monkeypatch, history, system="Be brief.", tools=TOOLS) == expected


def test_a_system_message_within_and_successive_messages_of_a_role_are_accepted(serving, monkeypatch):
    server = serving("qwen3")
    found = message_tokens(
        server, monkeypatch, [*ASK, {"role": "user", "content": "you"}, {"role": "system", "content": "Now."}, *ASK]
    )
    parts = {"role": "user", "content": [text("hi"), text("you")]}
    assert found == chat_tokens(server, [parts, {"role": "system", "content": "Now."}, *ASK])


def test_thinking_is_the_templates_switch_or_no_change_or_refused(serving, thinking, monkeypatch):
    server = serving("qwen3")
    free = chat_tokens(server, ASK)
    off = chat_tokens(server, ASK, chat_template_kwargs={"enable_thinking": False})
    assert off != free
    for config, expected in (
        ({"type": "disabled"}, off),
        ({"type": "enabled", "budget_tokens": 1024}, free),
        ({"type": "adaptive"}, free),
        ({"type": "adaptive", "display": "summarized"}, free),
    ):
        assert message_tokens(server, monkeypatch, ASK, thinking=config, max_tokens=1) == expected
    llama, oss = serving("llama3_1"), serving("gptoss")
    create(llama, thinking={"type": "disabled"}, max_tokens=1)
    assert "this model never reasons" in refused(llama, thinking={"type": "enabled", "budget_tokens": 1024})["message"]
    create(oss, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1)
    assert "this model always reasons" in refused(oss, thinking={"type": "disabled"})["message"]
    assert "thinking.display must be" in refused(server, thinking={"type": "adaptive", "display": "omitted"})["message"]
    low = message_tokens(oss, monkeypatch, ASK, output_config={"effort": "low"})
    assert low == chat_tokens(oss, ASK, chat_template_kwargs={"reasoning_effort": "low"}) != chat_tokens(oss, ASK)
    create(llama, output_config={"effort": "high"}, max_tokens=1)
    message = refused(llama, output_config={"effort": "low"})["message"]
    assert "output_config.effort: this model's chat template has no way to ask for 'low'" in message


def test_calls_are_blocks_and_a_stream_has_the_same_ones(serving, say):
    server, said = serving("qwen3"), ["I look.\n", CALL, "\n", OTHER, "<|im_end|>"]
    say(server, said, ends=True)
    whole = create(server, tools=TOOLS, ignore_eos=True)
    assert whole.stop_reason == "tool_use"
    spoken, first, second = whole.content
    assert spoken.text == "I look." and (first.type, second.type) == ("tool_use", "tool_use")
    assert (first.name, first.input) == ("search", {"query": "ü 1", "limit": 3})
    assert (second.name, second.input) == ("look_up", {"on": True})
    assert first.id.startswith("toolu_") and first.id != second.id
    say(server, said, ends=True)
    found, events = streamed(server, tools=TOOLS, ignore_eos=True)
    assert events.count("input_json") > 6, "the first call's arguments come in parts"
    ids = {"content": {"__all__": {"id"}}, "id": True}
    assert found.model_dump(exclude=ids, exclude_none=True) == whole.model_dump(exclude=ids, exclude_none=True)


def test_calls_can_be_forced_forbidden_and_single(serving, say):
    server = serving("qwen3")
    say(server, [CALL, OTHER, "<|im_end|>"], ends=True)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(create(server, tools=TOOLS, tool_choice=choice, ignore_eos=True).content) == 1
    say(server, [CALL, "<|im_end|>"], ends=True)
    found = create(server, tools=TOOLS, tool_choice={"type": "none"}, ignore_eos=True)
    assert found.content[0].text == CALL and found.stop_reason == "end_turn"
    server = serving("mistral_args")
    short = {
        "type": "object",
        "properties": {"query": {"type": "string", "maxLength": 4}},
        "required": ["query"],
        "additionalProperties": False,
    }
    for seed, choice in enumerate([{"type": "any"}, {"type": "tool", "name": "search"}]):
        choice["disable_parallel_tool_use"] = True
        tools = (
            [LOOK_UP, {**SEARCH, "input_schema": short}] if "name" in choice else [{**SEARCH, "input_schema": short}]
        )
        found = create(server, tools=tools, tool_choice=choice, max_tokens=200, seed=seed)
        (call,) = found.content
        assert found.stop_reason == "tool_use" and call.name == "search" and len(call.input["query"]) <= 4


class Search(BaseModel):
    """Looks things up."""

    limit: int
    on: bool


def test_the_clients_parse_reads_structured_output(serving):
    server = serving("mistral_args")
    with connected(server) as client:
        asked = arguments(max_tokens=200, temperature=0.7, seed=3)
        found = client.messages.parse(**asked, output_format=Search)
        assert isinstance(found.parsed_output, Search)
        with client.messages.stream(**asked, output_format=Search) as stream:
            assert stream.get_final_message().parsed_output == found.parsed_output
        schema = {"type": "json_schema", "schema": Search.model_json_schema()}
        found = client.messages.create(**asked, output_config={"format": schema})
        Search.model_validate_json(found.content[0].text)


def test_the_clients_own_loop_runs_its_tools(serving, say, monkeypatch):
    server = serving("qwen3")
    asked = []

    @anthropic.beta_tool
    def search(query: str, limit: int) -> str:
        """Looks it up.

        Args:
            query: What.
            limit: How many.
        """
        asked.append((query, limit))
        say(server, ["It is 4.", "<|im_end|>"], ends=True)
        return "4"

    say(server, [CALL, "<|im_end|>"], ends=True)
    with connected(server) as client:
        runner = client.beta.messages.tool_runner(
            **arguments(max_tokens=60, ignore_eos=True),
            tools=[search],
            betas=["fine-grained-tool-streaming-2025-05-14"],
        )
        final = runner.until_done()
    assert asked == [("ü 1", 3)] and final.content[0].text == "It is 4."


def test_answers_can_be_sent_back(thinking, serving, say):
    first = create(thinking, temperature=0)
    again = create(thinking, [*ASK, {"role": "assistant", "content": first.content}, *ASK], temperature=0)
    assert again.content == first.content
    server = serving("mistral")
    say(server, ['[TOOL_CALLS] [{"name": "search", "arguments": {"query": "x"}}]', "</s>"], ends=True)
    found = create(server, tools=TOOLS, ignore_eos=True)
    turns = [
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [result(found.content[0].id, content="4")]},
    ]
    assert create(server, [*ASK, *turns], tools=TOOLS, max_tokens=1).usage.output_tokens == 1


def test_async_clients_stream_too(thinking):
    import asyncio

    async def ask():
        async with anthropic.AsyncAnthropic(base_url=thinking.url, api_key="none") as client:
            asked = arguments(temperature=0)
            return [event async for event in await client.messages.create(**asked, stream=True)]

    events = asyncio.run(ask())
    assert events[0].type == "message_start" and events[-1].type == "message_stop"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0 is a block of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document', which is not supported here"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]}, "only text, tool_result may be"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "name": "b"}]}]}, "name is not of a block of type text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": [1]}]}]}, "citations is not supported here"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "answers no call before it"),
        ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "x"}]}, *ASK]}, "'server_tool_use'"),
        ({"messages": [*ASK, {"role": "assistant", "content": [called(f"t{n}") for n in range(1025)]}, *ASK]}, "1025 calls in one turn"),
        ({"messages": [*ASK, {"role": "assistant", "content": "I"}]}, "which would be continued"),
        ({"system": [{"type": "image"}]}, "system.0 is a block of type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema is missing"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name is missing"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name is 'a b'"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools.0.input_schema has the type 'string'"),
        ({"tools": [SEARCH, SEARCH]}, "2 tools have the name 'search'"),
        ({"tools": [LOOK_UP] * 1025}, "tools must be a list of up to 1024 tools"),
        ({"tools": [None]}, "tools.0: Input should be an object"),
        ({"tool_choice": {"type": "any"}}, "tool_choice requires a call, but there are no tools"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type is missing"),
        ({"system": [{"text": "x"}]}, "system.0.type is missing"),
        ({"stop": ["x"]}, "stop is not supported here; send stop_sequences"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs is not supported here; send thinking"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported here; send output_config"),
        ({"tools": [{**SEARCH, "defer_loading": True}]}, "tools.0.defer_loading is not supported here"),
        ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type must be auto, any, tool or none"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice has a name if and only if"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "names 'g'"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}}}, "uniqueItems"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "send output_config"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported here"),
        ({"container": "x"}, "container is not supported here"),
        ({"thread": {"type": "create"}}, "this server holds no conversations"),
        ({"speed": "fast"}, "speed is not supported here"),
        ({"stop_sequences": [""]}, "stop_sequences must be up to 16 strings"),
        ({"max_token": 3}, "unknown field 'max_token'"),
        ({"temperature": 0.001}, "temperature is below 0.01"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type must be enabled, disabled or adaptive"),
        ({"messages": [{"role": "user", "content": "ab" * 700_000}]}, "the prompt is too long"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_wrong_is_said_by_name_in_anthropics_shape(serving, body, said):
    error = refused(serving("qwen3"), **body)
    assert said in error["message"] and error["type"] == "invalid_request_error", error


def test_fields_without_effect_are_accepted(serving):
    with connected(serving("qwen3")) as client:
        client.messages.create(
            model="small", messages=ASK, max_tokens=1, metadata={"user_id": "u"}, service_tier="auto", stop_sequences=[],
            cache_control={"type": "ephemeral"}, tools=[{**SEARCH, "type": "custom", "cache_control": {"type": "ephemeral"}}],
            extra_headers={"anthropic-beta": "x", "anthropic-version": "1999-01-01"},
            extra_body={"mcp_servers": [], "context_management": {"edits": []}},
        )  # fmt: skip


def test_errors_are_the_clients_exceptions(serving, chat_folder, server):
    with connected(serving("qwen3")) as client:
        with pytest.raises(anthropic.NotFoundError, match="'large' does not exist") as caught:
            client.messages.create(model="large", messages=ASK, max_tokens=1)
        assert caught.value.type == "not_found_error" and caught.value.request_id.startswith("req-")
        assert caught.value.error_code == "model_not_found"
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.count_tokens(model="small", messages=[{"role": "user", "content": [{"type": "image"}]}])
        assert caught.value.type == "invalid_request_error"
    assert refused(server, "/v1/messages/batches", status=404)["type"] == "not_found_error"
    with server.http() as client:
        assert client.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
        assert client.post("/v1/messages", content=b"{").json()["type"] == "error"


def test_keys_and_limits_answer_in_anthropics_shape(chat_folder):
    limits = dict(api_key="secret", max_body_bytes=2000, max_requests=1, request_seconds=0.5, engine=ENGINE)
    long = arguments(max_tokens=500, ignore_eos=True)
    with running_server(chat_folder, model_name="small", **limits) as running:
        with connected(running) as client, pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**long)
        assert caught.value.body["type"] == "error" and caught.value.type == "authentication_error"
        for headers, status in (
            ({"x-api-key": "secret"}, 400),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": "é"}, 401),
        ):
            with running.http(headers={k: v.encode("latin-1") for k, v in headers.items()}) as client:
                assert client.post("/v1/messages", json={}).status_code == status
                assert client.get("/v1/models").status_code == (200 if status == 400 else 401)
        with connected(running, api_key="secret") as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                client.messages.create(model="small", messages=[{"role": "user", "content": "x" * 3000}], max_tokens=1)
            assert (caught.value.status_code, caught.value.type) == (413, "request_too_large")
            with client.messages.create(**long, stream=True) as stream:
                next(iter(stream))
                with pytest.raises(anthropic.RateLimitError) as caught:
                    client.messages.create(**long)
                assert caught.value.body["type"] == "error" and caught.value.type == "rate_limit_error"
            running.wait_until(lambda: not running.service.limits.requests)


def test_an_error_within_a_stream_is_an_event(chat_folder):
    many = arguments(max_tokens=500, ignore_eos=True)
    with running_server(chat_folder, model_name="small", request_seconds=0.3, engine=ENGINE) as running:
        step = running.engine.step

        def slow():
            import time

            time.sleep(0.05)
            return step()

        running.engine.step = slow
        with connected(running) as client:
            with pytest.raises(anthropic.APIStatusError) as caught, client.messages.stream(**many) as stream:
                stream.until_done()
            assert caught.value.type == "timeout_error" and "longer than 0.3 seconds" in caught.value.message
            with pytest.raises(anthropic.RequestTimeoutError):
                client.messages.create(**many)
        running.wait_until(running.all_pages_free)
