"""Every limit answers with its own status, and keys keep their routes."""

import contextlib
import socket
import time

import pytest

from lockstep.config import EngineConfig, ServeConfig, validate
from lockstep.errors import UserError
from tests.server.conftest import ENGINE, running_server

LONG = dict(prompt="x", max_tokens=500, ignore_eos=True)
SMALL = EngineConfig(max_tokens_per_step=64, max_sequences=2, cache_tokens=2048)


@pytest.fixture(scope="module")
def limited(chat_folder):
    limits = dict(max_body_bytes=2000, max_prompt_tokens=30, max_n=4, max_requests=3, max_waiting=3)
    with running_server(chat_folder, api_key="kéy", engine=SMALL, **limits) as running:
        yield running


AUTHORIZED = {"Authorization": "Bearer kéy".encode()}


def test_an_address_that_others_can_reach_needs_a_key_and_impossible_settings_are_named():
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):
        with pytest.raises(UserError, match="set an API key"):
            validate(ServeConfig(model="m", host=host))
        validate(ServeConfig(model="m", host=host, api_key="k"))
    for host in ("127.0.0.1", "::1", "localhost"):
        validate(ServeConfig(model="m", host=host))
    config = ServeConfig(model="m", port=70000, max_n=0, shutdown_seconds=-1, api_key="a", admin_key="a", dtype="int4")
    with pytest.raises(UserError) as caught:
        validate(config)
    for name in ("port is 70000", "max_n is 0", "shutdown_seconds is -1", "admin_key equals api_key", '"int4"'):
        assert name in str(caught.value)


def test_v1_routes_ask_for_the_key_and_health_does_not(limited):
    with limited.http() as client:
        for headers in ({}, {"Authorization": "Bearer key"}, {"Authorization": "Basic kéy".encode()}):
            answer = client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert client.get("/v1/models", headers=headers).status_code == 401
        assert client.get("/v1/models", headers=AUTHORIZED).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=AUTHORIZED).status_code == 200
        for host in ("x#", "x?", "x/admin", "/health#", ""):  # none gets past the key
            assert client.post("/v1/completions", json={"prompt": "x"}, headers={"Host": host}).status_code == 401
            assert client.post("/admin/weights", json={"path": "x"}, headers={"Host": host}).status_code == 404


def test_a_body_that_is_too_large_is_refused_before_it_is_parsed(limited):
    data = b'{"prompt": "' + b"x" * 3000 + b'"}'
    headers = AUTHORIZED | {"Content-Type": "application/json"}
    for content in (data, (data[i : i + 500] for i in range(0, len(data), 500))):
        with limited.http() as client:
            answer = client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413 and "2000 bytes" in answer.json()["error"]["message"]


def test_prompts_and_n_have_limits(limited):
    with limited.http(headers=AUTHORIZED) as client:

        def refused(**body):
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 400
            return answer.json()["error"]

        assert refused(prompt=[1] * 31)["code"] == "context_length_exceeded"
        assert "this server allows 4" in refused(prompt="x", n=5)["message"]
        assert "6 sequences, but the server allows 5" in refused(prompt=["x", "y"], n=3)["message"]


def test_too_many_requests_or_sequences_get_429_and_when_to_come_back(limited):
    def hold(client, n):
        return client.stream("POST", "/v1/completions", json=LONG | {"n": n, "stream": True})

    with limited.http(headers=AUTHORIZED) as client:
        with hold(client, 4):
            answer = client.post("/v1/completions", json={"prompt": "x", "n": 2})
            assert answer.status_code == 429 and "5" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
        limited.wait_until(lambda: limited.service.limits.sequences == 0)
        with hold(client, 1), hold(client, 1), hold(client, 1):
            answer = client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 429 and "3 requests" in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == "rate_limit_error"
        limited.wait_until(lambda: limited.service.limits.requests == 0)
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_deadline_ends_answers_streams_and_bodies_and_the_work_for_a_client_that_does_not_read(chat_folder):
    options = dict(request_seconds=0.3, client_seconds=0, engine=ENGINE)
    with running_server(chat_folder, **options) as running, running.http() as client:
        many = LONG | {"n": 60}
        answer = client.post("/v1/completions", json=many)
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline"
        asked = (client.post("/v1/completions", json=many | {"stream": True}) for _ in range(50))
        # On a busy machine the time may be over before a stream begins.
        text = next(streamed.text for streamed in asked if streamed.status_code != 408)
        assert '"code": "deadline"' in text.splitlines()[-2] and "[DONE]" not in text
        running.wait_until(running.all_pages_free)

        def slow():
            yield b'{"prompt":'
            time.sleep(0.6)
            yield b'"x"}'

        answer = client.post("/v1/completions", content=slow(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 408
        with _ask_and_do_not_read(running):
            running.wait_until(lambda: running.all_pages_free() and not running.service.limits.sequences)


def test_without_a_key_only_names_of_this_machine_are_answered_and_nothing_redirects(server):
    with server.http() as client:
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "169.254.1.1", "0.0.0.0", ""):
            for path in ("/health", "/v1/models", "/admin/weights"):
                answer = client.get(path, headers={"Host": host})
                assert answer.status_code == 403, host
        for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"):
            assert client.get("/health", headers={"Host": host}).status_code == 200, host
        assert client.get("/v1/models/").status_code == client.get("/health/").status_code == 404


@pytest.fixture(scope="module")
def impatient(chat_folder):
    with running_server(chat_folder, client_seconds=0.5, max_connections=5, engine=ENGINE) as running:
        yield running


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_connection_whose_request_does_not_come_is_closed_and_so_is_one_too_many(impatient):
    beginnings = [b"", b"POST /v1", HEAD, HEAD + b"Content-Length: 99\r\n\r\n{", HEAD + b"Content-Length: 2\r\n\r\n{}{"]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(impatient.connect()) for _ in beginnings]
        with impatient.connect() as further, contextlib.suppress(ConnectionResetError):
            assert further.recv(1) == b""
        assert len(impatient.server.server_state.connections) == len(beginnings)
        for connection, beginning in zip(connections, beginnings):
            connection.sendall(beginning)
        until = time.monotonic() + 8
        while impatient.server.server_state.connections:
            assert time.monotonic() < until
            for connection in connections:  # a byte now and then does not keep it open
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b" ")
            time.sleep(0.1)
    with impatient.http() as client:
        assert client.get("/health").status_code == 200


def _ask_and_do_not_read(running):
    """For some megabytes; the window, set before the connection is made, takes a fraction of them."""
    connection = socket.socket()
    connection.settimeout(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(running.server.servers[0].sockets[0].getsockname())
    body = b'{"prompt": "x", "n": 60, "max_tokens": 400, "ignore_eos": true, "stream": true, "logprobs": 20}'
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert connection.recv(100)
    return connection


def test_a_client_that_does_not_read_loses_its_sequences(impatient):
    with _ask_and_do_not_read(impatient):
        impatient.wait_until(lambda: not impatient.server.server_state.connections, seconds=60)
        impatient.wait_until(lambda: impatient.all_pages_free() and not impatient.service.limits.requests)


def test_a_body_without_end_is_cut_off(limited):
    address = limited.server.servers[0].sockets[0].getsockname()
    with socket.create_connection(address) as connection:
        connection.settimeout(10)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer kéy\r\n"
        head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        sent, answer = 0, b""
        try:
            while sent < 50_000_000:
                connection.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
                sent += 0x10000
        except (BrokenPipeError, ConnectionResetError):
            pass
        with contextlib.suppress(ConnectionResetError):
            answer = connection.recv(4096)
    assert sent < 20_000_000 and (not answer or b" 413 " in answer)
