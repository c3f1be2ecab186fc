"""Whatever is sent: an answer in OpenAI's shape, never a 5xx, no page lost, and the engine goes on."""

import asyncio
import dataclasses
import json
import random
import re
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep import build_model, save_model
from lockstep.generate.server import answer as answers
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.body import MOST, parse_body
from lockstep.generate.server.protocol import IGNORED, NEUTRAL, ChatRequest, CompletionRequest
from lockstep.generate.server.responses import Reply
from lockstep.model import read_config
from tests.server.conftest import running_server

SETTINGS = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
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


def test_odd_values_in_any_field_are_answered_and_break_nothing(server):
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
    assert len(statuses) >= 60 and statuses.count(200) > 10 and statuses.count(400) > 10, statuses
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


def test_bytes_that_are_no_http_break_nothing(server):
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


def test_a_body_with_too_many_of_a_character_is_refused_unparsed():
    for character, most in MOST.items():
        with pytest.raises(ApiError, match=f"the character {re.escape(character)} more than {most} times") as refused:
            parse_body(b"{" + character.encode() * (most + 1), CompletionRequest)
        assert refused.value.response().status_code == 413


def test_work_on_large_requests_is_done_one_at_a_time_and_ends_though_nobody_waits_for_it(server):
    order, at_once, may_end, in_turn = [], [], threading.Event(), server.service.in_turn

    def long():
        may_end.wait(5)
        order.append("long has ended")
        raise ValueError  # nobody sees it

    def short(name):
        at_once.append(name)
        order.append(name)
        assert at_once == [name]
        at_once.remove(name)

    async def run():
        one, two, three, gone = (
            asyncio.ensure_future(in_turn(work))
            for work in (long, partial(short, "two"), partial(short, "three"), partial(short, "gone"))
        )
        await asyncio.sleep(0.01)
        one.cancel()
        gone.cancel()
        await asyncio.wait({one, gone})
        assert one.cancelled() and not order
        may_end.set()
        await asyncio.gather(two, three)

    asyncio.run(run())
    assert order == ["long has ended", "two", "three"]


def _chat(server, messages):
    body = json.dumps({"messages": [{"role": "user", "content": "a"}] * messages, "max_tokens": 1}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
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
WORK = {
    "a long chat is rendered": ("template", "render", 400, {"messages": [{"role": "user", "content": "a"}] * 2000}),
    "a long prompt is tokenized": ("tokenizer", "encode_batch", 400, {"prompt": "a " * 3000}),
    "many short prompts are tokenized": ("tokenizer", "encode_batch", 200, {"prompt": ["ab" * 100] * 32}),
    "begun samples are decoded": (answers, "_push_begun", 200, BEGUN),
    "a completion is written": (Reply, "answer", 200, {"prompt": "a", "logprobs": 3, "n": 2, "max_tokens": 3}),
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
    with server.http() as client:
        answer = client.post(route, json={"max_tokens": 1, **body})
    assert answer.status_code == status and held == [200], answer.text
    if body is BEGUN:
        assert [len(choice["token_ids"]) for choice in answer.json()["choices"]] == [3, 2]


def test_a_text_that_is_too_long_in_any_case_is_refused_by_its_characters(server):
    """Before any work on it."""
    long, said = "ab" * 700_000, "a prompt of 1400000 characters has more than the 511 tokens"
    with server.http() as client:
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": long}]})
    for answer in (server.complete(prompt=long), chat):
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]


class Panic(BaseException):
    """As a panic of a library in Rust arrives: no Exception."""


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
    config = dataclasses.replace(read_config(chat_folder), tie_embeddings=False)
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
