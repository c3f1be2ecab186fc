"""Whatever is sent: an answer in OpenAI's shape, never a 5xx, no page lost, and the engine goes on."""

import asyncio
import dataclasses
import json
import random
import re
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import h11
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep import build_model, load_model, save_model
from lockstep.data.decoding import token_bytes, token_text
from lockstep.generate import engine as engine_module
from lockstep.generate.server import answer as answers
from lockstep.generate.server import engine_loop
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.body import LARGE, MOST, parse_body, parse_in_turn
from lockstep.generate.server.limits import in_turn
from lockstep.generate.server.protocol import IGNORED, NEUTRAL, ChatRequest, CompletionRequest
from lockstep.generate.server.responses import Reply
from tests.server.conftest import running_server

SETTINGS = settings(
    max_examples=350, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 513, -(2**31), 2**31, 2**63, -(2**63), 10**40, 1e-300, 1e308, -0.0]),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-2, 600), max_size=6),
    st.lists(st.text(max_size=4), max_size=4),
    st.lists(st.lists(st.integers(-1, 520), max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=2), max_leaves=10),
)
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, *NEUTRAL, *IGNORED})
SENSIBLE = {
    "max_tokens": st.integers(1, 4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(0, 5),
    "n": st.integers(1, 3),
    "seed": st.integers(0, 5),
    "stop": st.text(min_size=1, max_size=2),
    "stream": st.booleans(),
    "logprobs": st.integers(0, 5),
    "return_token_ids": st.booleans(),
    "prompt": st.one_of(st.text(min_size=1, max_size=30), st.lists(st.integers(0, 511), min_size=1, max_size=20)),
}


@st.composite
def bodies(draw):
    """Sensible fields, of which some are replaced by junk."""
    body = {"max_tokens": 2, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    body |= {name: draw(SENSIBLE[name]) for name in draw(st.lists(st.sampled_from(sorted(SENSIBLE)), max_size=6))}
    route = draw(st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
    body.pop("messages" if route == "/v1/completions" else "prompt", None)
    if route == "/v1/chat/completions" and "logprobs" in body:
        body["logprobs"] = bool(body["logprobs"])
    body |= {name: draw(JUNK) for name in draw(st.lists(st.sampled_from(FIELDS), max_size=2))}
    return route, body


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


def test_odd_values_in_any_field(server):
    statuses = []
    with server.http() as client:

        @SETTINGS
        @given(bodies())
        def send(request):
            route, body = request
            # json.dumps writes NaN and Infinity, and lone surrogates as escapes: both are part of the trial.
            answer = client.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
            statuses.append(answer.status_code)
            _check(answer)

        send()
    assert len(statuses) >= 350 and statuses.count(200) > 60 and statuses.count(400) > 60, statuses
    _healthy(server)


@settings(SETTINGS, max_examples=150)
@given(seed=st.integers(0, 2**32))
def _send_mangled(client, seen, seed):
    draw = random.Random(seed)
    valid = {"prompt": "añ\ud83d\ude00", "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "n": 1}
    data = bytearray(json.dumps(valid, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass"))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randint(1, 5)]
            case 2:
                data[at:at] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 5)))
            case 3:
                data[at:at] = draw.choice([b"NaN", b"1e999", b'"\\ud800"', b"-" * 3, b"[" * 500, b"\x00", b"9" * 5000])
        data = data or bytearray(b"{")
    route = draw.choice(["/v1/completions", "/v1/chat/completions"])
    answer = client.post(route, content=bytes(data), headers={"Content-Type": "application/json"})
    seen.append(answer.status_code)
    _check(answer)


def test_mangled_bytes_in_a_body(server):
    seen = []
    with server.http() as client:
        _send_mangled(client, seen)
    assert len(seen) >= 150 and seen.count(400) > 100
    _healthy(server)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{}", "prompt"),
        (b"[1, 2]", None),
        (b"\xff\xfe", None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "temperature": -1}', "temperature"),
        (b'{"prompt": "x", "temperature": 1e-40}', "temperature"),
        (b'{"prompt": "x", "top_p": 1e999}', "top_p"),
        (b'{"prompt": "x", "max_tokens": 99999999999999999999}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": "5"}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "x", "n": 0}', "n"),
        (b'{"prompt": "x", "n": 1000}', "n"),
        (b'{"prompt": "x", "stop": [""]}', "stop"),
        (b'{"prompt": "x", "stream_options": {}}', "stream_options"),
        (b'{"prompt": ""}', "prompt"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": [[]]}', "prompt"),
        (b'{"prompt": [1, "a"]}', "prompt"),
        (b'{"prompt": [1, -1]}', "prompt"),
        (b'{"prompt": [999999]}', "prompt"),
        (b'{"prompt": [[1], [1, 99999999999999999999999999]]}', "prompt"),
        (b'{"prompt": "x", "seed": 1, "begun": [[999999]]}', "begun"),
        (b'{"prompt": "' + b"word " * 5000 + b'"}', "prompt"),
        (b'{"prompt": "x", "max_tokens": 600}', "max_tokens"),
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


def test_a_body_in_chunks_is_taken_in_small_parts_and_a_whole_one_in_large(server, monkeypatch):
    parts, receive = [], h11.Connection.receive_data

    def record(connection, data):
        parts.append(len(data))
        receive(connection, data)

    monkeypatch.setattr(h11.Connection, "receive_data", record)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 100_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.settimeout(30)
        for requests, answers in (([whole], 1), ([chunked], 1), ([whole, chunked, whole], 3)):
            parts.clear()
            connection.sendall(b"".join(requests))
            received = b""
            while received.count(b"HTTP/1.1 200") < answers:
                received += connection.recv(65536)
            of_whole = sum(requests.count(each) * len(each) for each in [whole])
            large = [part for part in parts if part > 2**10]
            # What is read in large parts is of whole bodies, and most of them is.
            assert max(parts) <= 2**16 and 0.9 * of_whole <= sum(large) <= of_whole, (sum(large), of_whole)


def test_a_head_may_have_cookies_of_a_proxy(server):
    with server.http() as client:
        for size, status in ((60_000, 200), (10**6, 400)):
            assert client.get("/health", headers={"Cookie": "x" * size}).status_code == status


def test_unknown_routes_methods_and_content_types_have_the_errors_shape(server):
    with server.http() as client:
        for answer, status in [
            (client.get("/v1/nothing"), 404),
            (client.get("/nothing"), 404),
            (client.post("/"), 405),
            (client.get("/v1/completions"), 405),
            (client.delete("/v1/models"), 405),
            (client.post("/v1/completions", content=b"{}"), 415),
            (client.post("/v1/completions", data={"prompt": "x"}), 415),
            (client.post("/v1/completions", json={"prompt": "x"}, headers={"Content-Encoding": "gzip"}), 415),
            (
                client.post("/v1/completions", json={}, headers=[("Content-Encoding", c) for c in ("identity", "br")]),
                415,
            ),
            (client.post("/v1/completions", json={}, headers={"Content-Encoding": ", Identity"}), 400),
        ]:
            assert answer.status_code == status
            _check(answer)
            code = {404: "not_found", 405: "method_not_allowed"}.get(status)
            assert answer.json()["error"]["code"] == code
        assert client.head("/health").status_code == 200 and not client.head("/health").content
        assert set(client.post("/health").headers["allow"].split(", ")) == {"GET", "HEAD"}
        schema = client.get("/openapi.json").json()
    assert schema["paths"]["/health"].keys() == {"get"}
    assert "prompt" in json.dumps(schema["paths"]["/v1/completions"]["post"]["requestBody"])


def test_bytes_that_are_no_http_do_not_hurt(server):
    draw = random.Random(0)
    address = server.server.servers[0].sockets[0].getsockname()
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    garbage = [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        start + b"Content-Length: -5\r\n\r\n",
        start + b"Content-Length: 99999999999999999999999\r\n\r\n{",
        start + b"Content-Length: 50\r\n\r\n{",
        start + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
        start + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        start + b"X-Request-Id: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
        start + b"Authorization: Bearer \xff\r\nContent-Length: 2\r\n\r\n{}",
    ]
    garbage += [bytes(draw.randrange(256) for _ in range(draw.randint(1, 300))) for _ in range(20)]
    for data in garbage:
        with socket.create_connection(address) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5)
            answer = b""
            try:
                while part := connection.recv(4096):
                    answer += part
            except ConnectionResetError:
                pass
            assert not answer.startswith(b"HTTP/1.1 5"), answer
    _healthy(server)


HEAVY = [
    (CompletionRequest, b'{"prompt": [' + b"{}, " * 350_000 + b"{}]}"),
    (CompletionRequest, b'{"prompt": [' + b"{}," * 32_000 + b"{}]}"),
    (CompletionRequest, b'{"prompt": [' + b"[1]," * 32_000 + b"[1]]}"),
    (CompletionRequest, b'{"prompt": [' + b"1," * 262_000 + b'"x"]}'),
    (CompletionRequest, b'{"prompt": "x", ' + b",".join(b'"%d":1' % i for i in range(32_000)) + b"}"),
    (ChatRequest, b'{"messages": [{"role": "user", "content": [' + b"{}," * 32_000 + b"{}]}]}"),
]


@pytest.mark.parametrize(("kind", "data"), HEAVY)
def test_a_body_of_many_values_is_refused_at_its_first_errors(kind, data):
    with pytest.raises(ApiError) as refused:
        parse_body(data, kind).check_fields()
    # Where the body was looked into at all: a million errors took 8 s and 2.2 GiB.
    found = refused.value.__context__
    assert found is None or found.error_count() <= 8


@pytest.mark.parametrize(("character", "most"), MOST.items())
def test_a_body_with_too_many_of_a_character_is_refused_unparsed(character, most):
    with pytest.raises(ApiError, match=f"the character {re.escape(character)} more than {most} times") as refused:
        parse_body(b"{" + character.encode() * (most + 1), CompletionRequest)
    assert refused.value.response().status_code == 413


def test_one_large_body_is_parsed_in_a_turn_of_the_event_loop(monkeypatch):
    turn, parsed = 0, []
    monkeypatch.setattr("lockstep.generate.server.body.parse_body", lambda *_: parsed.append(turn))

    async def count():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def read():
        counting, parsing = asyncio.create_task(count()), asyncio.Lock()
        await asyncio.gather(*(parse_in_turn(b" " * LARGE, CompletionRequest, parsing) for _ in range(6)))
        counting.cancel()

    asyncio.run(read())
    assert len(parsed) == len(set(parsed)) == 6


@pytest.mark.parametrize("kind", ["rendered", "tokenized", "written"])
def test_large_requests_are_worked_on_one_at_a_time(server, monkeypatch, kind):
    service, at_once = server.server._service, []
    owner, name = {
        "rendered": (service.template, "render"),
        "tokenized": (service.tokenizer, "encode_batch"),
        "written": (Reply, "answer"),
    }[kind]
    work, working = getattr(owner, name), []

    def call(*values):
        working.append(None)
        at_once.append(len(working))
        time.sleep(0.05)
        working.pop()
        return work(*values)

    monkeypatch.setattr(owner, name, call)
    # Every answer is long, also one that is its end of text alone.
    monkeypatch.setattr("lockstep.generate.server.answer.LONG_ANSWER", 0)
    monkeypatch.setattr("lockstep.generate.server.app.LONG_CHAT", 1)
    prompt = ["ab" * 100] * 32 if kind == "tokenized" else "x"

    def ask(_):
        with server.http() as client:
            if kind == "rendered":
                messages = [{"role": "user", "content": "a"}]
                return client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).status_code
            return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).status_code

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [200] * 4
    assert at_once == [1] * 4


def test_a_turn_ends_with_its_work_and_not_with_the_one_who_waits_for_it():
    order, may_end = [], threading.Event()

    def long():
        may_end.wait(5)
        order.append("long has ended")
        raise ValueError  # nobody sees it

    async def run():
        turn = asyncio.Lock()
        one, other, gone = (
            asyncio.ensure_future(in_turn(turn, work))
            for work in (long, lambda: order.append("other"), lambda: order.append("gone"))
        )
        await asyncio.sleep(0.01)
        one.cancel()
        gone.cancel()
        await asyncio.wait({one, gone})
        assert one.cancelled() and not order and turn.locked()
        may_end.set()
        await other

    asyncio.run(run())
    assert order == ["long has ended", "other"]


def test_a_wait_for_a_turn_ends_with_its_client_and_holds_up_no_small_request(server, monkeypatch):
    template, may_end, rendered = server.server._service.template, threading.Event(), []
    render = template.render

    def wait(messages):
        if len(messages) > 1:
            rendered.append(may_end.wait(12))
        return render(messages)

    monkeypatch.setattr(template, "render", wait)

    def chat(messages):
        body = json.dumps({"messages": [{"role": "user", "content": "a"}] * messages, "max_tokens": 1}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    before = server.service.limits.requests
    large = [chat(100) for _ in range(8)]
    server.wait_until(lambda: server.service.limits.requests == before + 8 and server.service.turns.rendering.locked())
    for connection in large[1:]:
        connection.close()
    server.wait_until(lambda: server.service.limits.requests == before + 1)
    with chat(1) as small:
        small.settimeout(10)
        assert small.recv(100).startswith(b"HTTP/1.1 200")
    may_end.set()
    server.wait_until(lambda: server.service.limits.requests == before)
    large[0].close()
    assert rendered == [True]


def test_a_wait_for_a_turn_has_the_time_of_its_request_and_a_second_signal_ends_it(chat_folder, monkeypatch):
    may_end = threading.Event()
    chat = {"messages": [{"role": "user", "content": "a"}] * 100, "max_tokens": 1}
    with running_server(chat_folder, request_seconds=1.0) as server, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(server.service.template, "render", lambda _: str(may_end.wait(10)))
        with server.http() as client:
            late = [pool.submit(client.post, "/v1/chat/completions", json=chat) for _ in range(2)]
            assert [answer.result().status_code for answer in late] == [408, 408]
        may_end.set()
    may_end.clear()
    with running_server(chat_folder) as server, ThreadPoolExecutor(3) as pool:
        rendered = []
        monkeypatch.setattr(server.service.template, "render", lambda _: rendered.append(None) or str(may_end.wait(10)))
        with server.http() as client:
            waiting = [pool.submit(client.post, "/v1/chat/completions", json=chat) for _ in range(3)]
            server.wait_until(lambda: server.service.limits.requests == 3 and rendered)
            for _ in range(2):
                server.server._event_loop.call_soon_threadsafe(server.server.begin_end)
            # The one that is rendered, and those that wait for it.
            assert [answer.result(5).status_code for answer in waiting] == [503] * 3
            may_end.set()
    assert len(rendered) == 1


def _until_health_has_answered(server, held, work):
    """`work`, which begins when the server has answered another client: never, were it called in the event loop."""

    def call(*values):
        with server.http() as client:
            held.append(client.get("/health", timeout=15).status_code)
        return work(*values)

    return call


def test_health_answers_while_long_texts_are_rendered_and_tokenized(server, monkeypatch):
    service, held = server.server._service, []
    until_health_has_answered = partial(_until_health_has_answered, server, held)
    monkeypatch.setattr(service.template, "render", until_health_has_answered(service.template.render))
    monkeypatch.setattr(service.tokenizer, "encode_batch", until_health_has_answered(service.tokenizer.encode_batch))
    messages = [{"role": "user", "content": "a"}] * 2000
    assert server.complete(prompt="a " * 3000).status_code == 400
    assert server.complete(prompt=["a " * 3000] * 3).status_code == 400
    with server.http() as client:
        assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 400
    assert len(held) >= 3 and set(held) == {200}


def test_health_answers_while_many_short_prompts_are_tokenized(server, monkeypatch):
    tokenizer, held = server.server._service.tokenizer, []
    for name in ("encode", "encode_batch"):
        monkeypatch.setattr(tokenizer, name, _until_health_has_answered(server, held, getattr(tokenizer, name)))
    answer = server.complete(prompt=["ab" * 100] * 32, max_tokens=1)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 32
    assert held == [200]


def test_health_answers_while_begun_samples_are_decoded(server, monkeypatch):
    held = []
    monkeypatch.setattr(answers, "_push_begun", _until_health_has_answered(server, held, answers._push_begun))
    body = dict(prompt="a", n=2, max_tokens=4, seed=1, begun=[[70], [71, 72]], ignore_eos=True, return_token_ids=True)
    choices = server.complete(**body).json()["choices"]
    assert [len(choice["token_ids"]) for choice in choices] == [3, 2] and held == [200]
    context = server.server._service.context
    assert "exceed the context" in server.complete(**body | {"max_tokens": context}).text
    assert held == [200]


@pytest.mark.parametrize("chat", [False, True])
def test_health_answers_while_log_probabilities_are_written(server, monkeypatch, chat):
    held = []
    name = "_chat_logprobs" if chat else "_completion_logprobs"
    monkeypatch.setattr(Reply, name, _until_health_has_answered(server, held, getattr(Reply, name)))
    with server.http() as client:
        if chat:
            body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3}
        else:
            body = {"prompt": "a", "logprobs": 3}
        route = "/v1/chat/completions" if chat else "/v1/completions"
        answer = client.post(route, json=body | {"n": 2, "max_tokens": 3})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
    assert held == [200, 200]


def test_a_token_is_decoded_once_for_all_log_probabilities(server, monkeypatch):
    tokenizer, seen = server.server._service.tokenizer, []
    decode, text = tokenizer.decode, tokenizer.decode([300])
    token_text(tokenizer, 299)  # the first one also decodes a text to add tokens to
    monkeypatch.setattr(tokenizer, "decode", lambda ids: seen.append(tuple(ids)) or decode(ids))
    for _ in range(2):
        assert token_text(tokenizer, 300) == text and token_bytes(tokenizer, 300) == text.encode()
    assert len(seen) <= 1


def test_an_idle_server_returns_once_what_its_steps_have_freed(chat_folder, monkeypatch):
    """When it does; how much the call returns is tested in a process of its own (tests/test_host_memory.py)."""
    returned, really = [], engine_module.return_freed_memory
    monkeypatch.setattr(engine_loop, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(
        engine_module, "return_freed_memory", lambda: returned.append(running.engine.has_work) or really()
    )
    with running_server(chat_folder) as running:
        for _ in range(2):
            before = len(returned)
            assert running.complete(prompt="a", max_tokens=2).status_code == 200
            running.wait_until(lambda before=before: len(returned) > before)
            time.sleep(0.3)
            assert returned == [False] * len(returned) and len(returned) <= before + 2, "once, and maybe before it"


def test_a_text_that_is_too_long_in_any_case_costs_no_work(server, monkeypatch):
    def fail(*_):
        raise AssertionError("work was done")

    service, long = server.server._service, "ab" * 700_000
    for name in ("encode", "encode_batch"):
        monkeypatch.setattr(service.tokenizer, name, fail)
    monkeypatch.setattr(service.template, "render", fail)
    assert server.complete(prompt=long).status_code == 400
    with server.http() as client:
        body = {"messages": [{"role": "user", "content": long}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 400


class Panic(BaseException):
    """As a panic of a library in Rust arrives: no Exception."""


@pytest.mark.parametrize("prompt", ["short", ["long " * 900]])
def test_a_text_on_which_the_tokenizer_panics_is_a_clients_error(server, monkeypatch, prompt):
    class Panicking:
        def __getattr__(self, name):
            def panic(*_, **__):
                raise Panic("range end index 3 out of range")

            return panic

    tokenizer = server.server._service.tokenizer
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer, "_backend", Panicking())
        answer = server.complete(prompt=prompt, max_tokens=1)
    assert answer.status_code == 400 and "the tokenizer fails on this text" in answer.json()["error"]["message"]
    _check(answer)
    _healthy(server)


def test_a_panic_in_the_engines_thread_is_told_and_health_says_so(chat_folder, monkeypatch):
    with running_server(chat_folder) as running:

        def panic():
            raise Panic

        monkeypatch.setattr(running.engine.scheduler, "schedule", panic)
        answer = running.complete(prompt="x", max_tokens=3)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_failed"
        with running.http() as client:
            assert client.get("/health").status_code == 503
        assert running.complete(prompt="x", max_tokens=3).status_code == 503


def test_a_request_whose_logits_are_not_finite_gets_an_error_and_others_their_tokens(chat_folder, tmp_path):
    shutil.copytree(chat_folder, tmp_path, dirs_exist_ok=True)
    model = load_model(chat_folder)
    config = dataclasses.replace(model.config, tie_embeddings=False)
    untied = build_model(config, dtype="bfloat16", seed=3)
    with torch.no_grad():
        untied.embed_tokens.weight[100] = torch.nan
    save_model(untied, tmp_path)
    with running_server(tmp_path) as running:
        good = dict(
            prompt=[1, 2, 3], max_tokens=100, seed=1, ignore_eos=True, return_token_ids=True, stop_token_ids=[100]
        )
        expected = running.complete(**good).json()["choices"]
        bodies = [good if i % 2 else good | {"prompt": [1, 2, 3, 100]} for i in range(6)]
        answers = {}
        threads = [
            threading.Thread(target=lambda i=i, body=body: answers.update({i: running.complete(**body)}))
            for i, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, answer in answers.items():
            if i % 2:
                assert answer.json()["choices"] == expected
            else:
                assert answer.status_code == 500 and answer.json()["error"]["code"] == "not_finite"
        with running.http() as client:
            assert client.get("/health").status_code == 200
