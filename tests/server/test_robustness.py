# ruff: noqa: E501
"""Whatever is sent: an answer in OpenAI's shape, never a 5xx, no page lost, and the engine goes on."""

import json
import re
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import h11
import pytest
import torch

from lockstep import build_model, save_model
from lockstep.generate.server import answer as answers
from lockstep.generate.server import anthropic_messages, chats, responses_api
from lockstep.generate.server.anthropic_bodies import CountTokensRequest, MessagesRequest
from lockstep.generate.server.anthropic_reply import MessageReply
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.body import MOST, parse_body
from lockstep.generate.server.protocol import ChatRequest, CompletionRequest
from lockstep.generate.server.reply import Reply
from lockstep.generate.server.responses_body import ResponsesRequest
from lockstep.generate.server.responses_reply import ResponsesReply
from lockstep.model import read_config
from tests.server.conftest import Panic, running_server


def _check(answer):
    assert answer.status_code < 500, (answer.status_code, answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    else:
        assert answer.json()["choices"]


def _healthy(server):
    assert server.complete(prompt="x", max_tokens=2).status_code == 200
    server.wait_until(server.all_pages_free)
    with server.http() as client:
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[1, 2]", None),
        (b"\xff\xfe", None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "max_tokens": 99999999999999999999}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "x", "n": 1000}', "n"),
        (b'{"prompt": "x", "stop": [""]}', "stop"),
        (b'{"prompt": "x", "stream_options": {}}', "stream_options"),
        (b'{"prompt": ""}', "prompt"),
        (b'{"prompt": [1, "a"]}', "prompt"),
        (b'{"prompt": [999999]}', "prompt"),
        (b'{"prompt": [[1], [1, 99999999999999999999999999]]}', "prompt"),
        (b'{"prompt": "x", "seed": 1, "begun": [[999999]]}', "begun"),
        (b'{"prompt": "' + b"word " * 5000 + b'"}', "prompt"),
        (b'{"prompt": "x", "user": ' + b"[" * 15000 + b"]" * 15000 + b"}", None),
        (b'{"prompt": "x", "' + b"k" * 3000 + b'": 1}', "k" * 64),
    ],
)
def test_a_bad_body_is_refused_and_its_field_named(server, body, param):
    with server.http() as client:
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    _check(answer)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1, 2]",
        b"\xff\xfe",
        b'{"messages": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 99999999999999999999}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": true}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": [[]]}], "max_tokens": 1}',
        b'{"messages": [{"role": "user", "content": [{"type": {}}]}], "max_tokens": 1}',
        b'{"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{}]}]}], "max_tokens": 1}',
        b'{"messages": [{"role": "user", "content": "' + b"word " * 5000 + b'"}], "max_tokens": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "metadata": ' + b"[" * 15000 + b"]" * 15000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "' + b"k" * 3000 + b'": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [{"name": "f", "input_schema": {"type": []}}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "output_config": {"format": {"type": "json_schema", "schema": {"type": "text"}}}}',
    ],
    ids=range(15),
)  # fmt: skip
def test_a_bad_message_is_refused_in_anthropics_shape(server, body):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        with server.http() as client:
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        counted = path.endswith("tokens") and answer.status_code == 200  # what is too much for sampling only
        assert counted or answer.status_code == 400, answer.text
        assert counted or (answer.json()["error"]["message"] and answer.json()["type"] == "error")
    _healthy(server)


def test_unknown_routes_methods_and_content_types_have_the_errors_shape(server):
    with server.http() as client:
        for answer, status in [
            (client.get("/v1/nothing"), 404),
            (client.get("/nothing"), 404),
            (client.post("/"), 405),
            (client.get("/v1/completions"), 405),
            (client.post("/v1/completions", content=b"{}"), 415),
            (client.post("/v1/completions", data={"prompt": "x"}), 415),
            (client.post("/v1/completions", json={"prompt": "x"}, headers={"Content-Encoding": "gzip"}), 415),
            (client.post("/v1/completions", json={}, headers={"Content-Encoding": ", Identity"}), 400),
        ]:
            assert answer.status_code == status
            _check(answer)
            code = {404: "not_found", 405: "method_not_allowed"}.get(status)
            assert answer.json()["error"]["code"] == code
        for size, status in ((60_000, 200), (10**6, 400)):  # a proxy's cookies, and more than those
            assert client.get("/health", headers={"Cookie": "x" * size}).status_code == status
        assert client.head("/health").status_code == 200 and not client.head("/health").content
        assert set(client.post("/health").headers["allow"].split(", ")) == {"GET", "HEAD"}
        schema = client.get("/openapi.json").json()
    assert schema["paths"]["/health"].keys() == {"get"}
    assert "prompt" in json.dumps(schema["paths"]["/v1/completions"]["post"]["requestBody"])


HEAVY = [
    (CompletionRequest, b'{"prompt": [' + b"{}, " * 350_000 + b"{}]}"),
    (CompletionRequest, b'{"prompt": [' + b"{}," * 32_000 + b"{}]}"),
    (CompletionRequest, b'{"prompt": [' + b"[1]," * 32_000 + b"[1]]}"),
    (CompletionRequest, b'{"prompt": [' + b"1," * 262_000 + b'"x"]}'),
    (CompletionRequest, b'{"prompt": "x", ' + b",".join(b'"%d":1' % i for i in range(32_000)) + b"}"),
    (ChatRequest, b'{"messages": [{"role": "user", "content": [' + b"{}," * 32_000 + b"{}]}]}"),
    (ResponsesRequest, b'{"input": [' + b"{}," * 32_000 + b"{}]}"),
    (ResponsesRequest, b'{"input": [' + b'{"type": "x"},' * 32_000 + b"{}]}"),
    (ResponsesRequest, b'{"input": [{"role": "user", "content": [' + b"{}," * 32_000 + b"{}]}]}"),
    (MessagesRequest, b'{"max_tokens": 1, "messages": [{"role": "user", "content": [' + b"{}," * 32_000 + b"{}]}]}"),
    (CountTokensRequest, b'{"messages": [' + b"[]," * 16_000 + b"[]]}"),
    (CountTokensRequest, b'{"messages": [{"role": "user", "content": "a"}], "tools": [' + b"{}," * 1_000 + b"{}]}"),
]


@pytest.mark.parametrize(("kind", "data"), HEAVY)
def test_a_body_of_many_values_is_refused_at_its_first_errors(kind, data):
    with pytest.raises(ApiError) as refused:
        parse_body(data, kind)
    # Where the body was looked into at all: a million errors took 8 s and 2.2 GiB.
    found = refused.value.__context__
    assert found is None or found.error_count() <= 8


def test_a_body_with_too_many_of_a_character_is_refused_unparsed():
    for character, most in MOST.items():
        with pytest.raises(ApiError, match=f"the character {re.escape(character)} more than {most} times") as refused:
            parse_body(b"{" + character.encode() * (most + 1), CompletionRequest)
        assert refused.value.response().status_code == 413


def test_input_that_may_be_chunks_of_a_byte_is_read_in_small_parts_and_bodies_of_known_length_in_large(
    server, monkeypatch
):
    parts, receive = [], h11.Connection.receive_data

    def record(connection, data):
        parts.append(len(data))
        receive(connection, data)

    monkeypatch.setattr(h11.Connection, "receive_data", record)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 50_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    with server.connect() as connection:
        for requests in ([whole], [chunked], [whole, chunked, whole]):
            parts.clear()
            connection.sendall(b"".join(requests))
            received = b""
            while received.count(b"HTTP/1.1 200") < len(requests):
                received += connection.recv(65536)
            known = requests.count(whole) * len(whole)
            large = [part for part in parts if part > 2**10]
            assert max(parts) <= 2**16 and 0.9 * known <= sum(large) <= known, (sum(large), known)


def _chat(server, messages):
    body = json.dumps({"messages": [{"role": "user", "content": "a"}] * messages, "max_tokens": 1}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = server.connect()
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_a_wait_for_a_turn_ends_with_its_client_or_a_second_signal_and_holds_up_no_small_request(
    chat_folder, monkeypatch
):
    may_end, rendered = threading.Event(), []
    with running_server(chat_folder) as server:
        render = server.service.template.render

        def wait(messages):
            if len(messages) > 1:
                rendered.append(may_end.wait(12))
            return render(messages)

        monkeypatch.setattr(server.service.template, "render", wait)
        large = [_chat(server, 100) for _ in range(4)]
        server.wait_until(lambda: server.service.limits.requests == 4)
        for connection in large[1:3]:
            connection.close()
        server.wait_until(lambda: server.service.limits.requests == 2)
        with _chat(server, 1) as small:
            small.settimeout(10)
            assert small.recv(100).startswith(b"HTTP/1.1 200")
        # The one that is rendered, and the one that waits for it.
        for number in (signal.SIGTERM, signal.SIGTERM):
            server.server.handle_exit(number, None)
        for connection in (large[0], large[3]):
            connection.settimeout(10)
            assert connection.recv(100).startswith(b"HTTP/1.1 503")
            connection.close()
        may_end.set()
    assert rendered == [True]


CHAT = {"messages": [{"role": "user", "content": "a"}], "n": 2, "max_tokens": 3}
BEGUN = dict(prompt="a", n=2, max_tokens=4, seed=1, begun=[[70], [71, 72]], ignore_eos=True, return_token_ids=True)
TEXT = {"type": "text", "text": "a"}
MESSAGE = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stop_sequences": []}
WORK = {
    "a long chat is rendered": ("template", "render", 400, {"messages": [{"role": "user", "content": "a"}] * 2000}),
    "many parts are joined": (chats, "_plain", 400, {"messages": [{"role": "user", "content": [TEXT] * 600}]}),
    "a long prompt is tokenized": ("tokenizer", "encode_batch", 400, {"prompt": "a " * 3000}),
    "many short prompts are tokenized": ("tokenizer", "encode_batch", 200, {"prompt": ["ab" * 100] * 32}),
    "begun samples are decoded": (answers, "_push_begun", 200, BEGUN),
    "a completion is written": (Reply, "answer", 200, {"prompt": "a", "logprobs": 3, "n": 2, "max_tokens": 3}),
    "a long conversation is read": (
        responses_api,
        "messages_of",
        400,
        {"input": [{"role": "user", "content": "a"}] * 2000},
    ),
    "a response is written": (ResponsesReply, "answer", 200, {"input": "a", "max_output_tokens": 3}),
    "blocks are converted": (anthropic_messages, "conversation", 400, {**MESSAGE, "system": [TEXT] * 300}),
    "a message is written": (MessageReply, "answer", 200, MESSAGE),
    "a chat is written": (Reply, "answer", 200, {**CHAT, "logprobs": True, "top_logprobs": 3}),
}


@pytest.mark.parametrize("kind", WORK)
def test_health_is_answered_while_large_requests_are_worked_on(server, monkeypatch, kind):
    """The work begins when the server has answered another client: never, were it done in the event loop."""
    owner, name, status, body = WORK[kind]
    owner = getattr(server.service, owner) if isinstance(owner, str) else owner
    work, held = getattr(owner, name), []

    def call(*values):
        with server.http() as client:
            held.append(client.get("/health", timeout=15).status_code)
        return work(*values)

    monkeypatch.setattr(owner, name, call)
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    route = "/v1/messages" if "stop_sequences" in body else route
    with server.http() as client:
        sent = ("/v1/responses", body) if "input" in body else (route, {"max_tokens": 1, **body})
        answer = client.post(sent[0], json=sent[1])
    assert answer.status_code == status and held == [200], answer.text
    if body is BEGUN:
        assert [len(choice["token_ids"]) for choice in answer.json()["choices"]] == [3, 2]


def test_a_text_that_is_too_long_in_any_case_is_refused_by_its_characters(server):
    """Before any work on it."""
    long, said = "ab" * 700_000, "too long: 1400000 characters have more tokens than this server allows, 511"
    for answer in (server.complete(prompt=long), server.chat(long)):
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_a_text_on_which_the_tokenizer_panics_is_a_clients_error(server, monkeypatch):
    class Panicking:
        def __getattr__(self, name):
            def panic(*_, **__):
                raise Panic("range end index 3 out of range")

            return panic

    with monkeypatch.context() as patched:
        patched.setattr(server.service.tokenizer, "_backend", Panicking())
        for prompt in ("short", ["long " * 900]):
            answer = server.complete(prompt=prompt, max_tokens=1)
            assert answer.status_code == 400
            assert "the tokenizer fails on this text" in answer.json()["error"]["message"]
            _check(answer)
    _healthy(server)


def test_a_request_whose_logits_are_not_finite_gets_an_error_and_others_their_tokens(chat_folder, tmp_path):
    shutil.copytree(chat_folder, tmp_path, dirs_exist_ok=True)
    config = replace(read_config(chat_folder), tie_embeddings=False)
    untied = build_model(config, dtype="bfloat16", seed=3)
    with torch.no_grad():
        untied.embed_tokens.weight[100] = torch.nan
    save_model(untied, tmp_path)
    good = dict(prompt=[1, 2, 3], max_tokens=40, seed=1, ignore_eos=True, return_token_ids=True, stop_token_ids=[100])
    bad = good | {"prompt": [1, 2, 3, 100]}
    with running_server(tmp_path) as running, ThreadPoolExecutor(4) as pool:
        expected = running.complete(**good).json()["choices"]
        found = list(pool.map(lambda body: running.complete(**body), [bad, good, bad, good]))
        for answer in found[::2]:
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "not_finite"
        assert [answer.json()["choices"] for answer in found[1::2]] == [expected] * 2
        with running.http() as client:
            assert client.get("/health").status_code == 200
