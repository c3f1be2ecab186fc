"""HTTP servers that answer what no server answers: each is refused or given up by name, and costs little."""

import asyncio
import contextlib
import json
import socket
import threading

import pytest

from lockstep.errors import RunStopped, UserError
from lockstep.generate import SamplingParams
from lockstep.model import preset
from lockstep.rl.generators import http_client
from lockstep.rl.generators.http_client import HttpClient, HttpError, Unreachable
from lockstep.rl.generators.http_remote import HttpRemote
from lockstep.rl.generators.http_servers import LockstepServer, ServerRequirements, find_server
from lockstep.rl.generators.pool import GeneratorPool
from tests.rl.generators.test_pool import wait_until

PARAMS = SamplingParams(n=2, max_tokens=4, seed=1)
OK = b"HTTP/1.1 200 OK\r\n\r\n"
DEEP = b"[" * 200_000
RED = "\x1b[31mred\x07\nline"


@contextlib.contextmanager
def server(answers):
    """The client of a server that gives `answers` by path; each is bytes, or is called with the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(caller):
        with contextlib.suppress(OSError), caller:
            path = caller.recv(65536).split(b" ")[1].decode()
            answer = next((answers[each] for each in answers if path.startswith(each)), OK + b"{}")
            if callable(answer):
                answer(caller)
            else:
                caller.sendall(answer)
            caller.shutdown(socket.SHUT_WR)
            while caller.recv(65536):
                pass

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def choice(index=0, **changes):
    plain = {
        "index": index,
        "token_ids": [7] * 4,
        "logprobs": {"token_logprobs": [-1.0] * 4},
        "weights_versions": [1] * 4,
        "finish_reason": "length",
    }
    return plain | changes


def stream(*choices):
    return OK + b"data: " + json.dumps({"choices": choices}).encode() + b"\n\ndata: [DONE]\n\n"


def both(**changes):
    return stream(choice(0, **changes), choice(1, **changes))


@contextlib.contextmanager
def asked(client):
    """A pool whose only generator is the server, which has been asked for samples."""
    pool = GeneratorPool(512, 1024, 0.2, vocab_size=100, eos_token_ids=(0, 5))
    remote = HttpRemote(client, LockstepServer(4), pool)
    pool.join(remote)
    try:
        pool.load_weights({"version": 1, "folder": "/nowhere"})
        wait_until(lambda: pool.ready)
        request = pool.add([1, 2], PARAMS)
        yield pool, pool.samples(request)
    finally:
        pool.leave(client.url)
        remote.close()


def test_what_a_proper_server_answers_is_taken():
    with server({"/v1/completions": both()}) as client, asked(client) as (pool, samples):
        wait_until(lambda: all(sample.finish_reason for sample in samples))
        assert pool.ready and samples[0].token_ids == [7] * 4


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (both(logprobs={"token_logprobs": [-1.0]}), "1 log-probabilities for 4 tokens"),
        (both(logprobs={"token_logprobs": [float("nan")] * 4}), "log-probability nan"),
        (both(weights_versions=[]), "0 versions for 4 tokens"),
        (both(weights_versions=[[1]] * 4), "[1] among versions"),
        (both(token_ids=[10**9] * 4), "token 1000000000 outside a vocabulary of 100"),
        (both(token_ids="abcd"), "no list of tokens"),
        (both(finish_reason="because"), "finish_reason 'because'"),
        (both(finish_reason="error"), "finish_reason 'error'"),
        (stream(choice(), choice(1), choice()), "tokens for a sample that is already finished"),
        (stream(choice(99)), "sample 99 of a request for 2"),
        (stream(choice(-1), choice(-2)), "sample -1 of a request for 2"),
        (OK + b"data: [1]\n\n", "makes no sense"),
        (
            both(
                token_ids=[7] * 3000,
                logprobs={"token_logprobs": [-1.0] * 3000},
                weights_versions=[1] * 3000,
            ),
            "3000 tokens, but at most 4 were requested",
        ),
        # Else whoever goes on with its samples would wait for what never comes, or go on behind their end.
        (both(token_ids=[7, 0, 7, 7]), "tokens after 0, which ends a sample"),
        (both(token_ids=[7, 7, 7, 5], finish_reason=None), "token 5, which ends a sample, without a finish_reason"),
        (both(finish_reason=None), "all 4 requested tokens without a finish_reason"),
    ],
)  # fmt: skip
def test_a_server_that_says_what_cannot_be_so_is_asked_no_more(caplog, answer, said):
    with server({"/v1/completions": answer}) as client, asked(client) as (pool, samples):
        wait_until(lambda: not pool.names)
        assert pool.banned == {client.url} and not any(sample.finish_reason for sample in samples[1:])
        (line,) = [line for line in caplog.messages if line.startswith(client.url)]
        assert said in line
        with pytest.raises(RunStopped, match="gets no more requests"):
            while True:
                pool.step()


@pytest.mark.parametrize(
    "answer",
    [OK + b"data: " + DEEP + b"\n\n", OK + b"data: " + json.dumps({"error": {"message": RED}}).encode() + b"\n\n"],
)
def test_a_stream_that_fails_is_lost_on_one_line(caplog, answer):
    with server({"/v1/completions": answer}) as client, asked(client) as (pool, _):
        wait_until(lambda: not pool.names)
        assert not pool.banned  # it may come again
        assert all(line.isprintable() for line in caplog.messages)


def test_of_endless_answers_only_so_much_is_read(monkeypatch):
    monkeypatch.setattr(http_client, "RESPONSE_BYTES", 2**17)

    def endless(head):
        def answer(connection):
            connection.sendall(head)
            with contextlib.suppress(OSError):
                while True:
                    connection.sendall(b"x" * 65536)

        return answer

    length = b"HTTP/1.1 500 x\r\nContent-Length: 1000000000000\r\n\r\n"
    chunk = b"HTTP/1.1 500 x\r\nTransfer-Encoding: chunked\r\n\r\nE8D4A51000\r\n"
    for head, error in ((length, HttpError), (chunk, HttpError), (length.replace(b"500", b"200"), Unreachable)):
        with server({"/v1/models": endless(head)}) as client, pytest.raises(error):
            asyncio.run(client.call("GET", "/v1/models"))

    async def first(client):
        async for event in client.events("/v1/completions", {}):
            return event

    stream_of_one_line = {"/v1/completions": endless(OK + b"data: ")}
    with server(stream_of_one_line) as client, pytest.raises(Unreachable, match="more than 131072 bytes"):
        asyncio.run(first(client))


MODELS = OK + b'{"data": [{"owned_by": "lockstep"}]}'
VLLM = OK + b'{"data": [{"owned_by": "vllm", "id": "m"}]}'


@pytest.mark.parametrize(
    "answers",
    [
        {"/v1/models": OK + DEEP},
        {"/v1/models": OK + b'{"data": [{"owned_by": ["x"]}]}'},
        {"/v1/models": b"HTTP/1.1 500 x\r\n\r\n" + RED.encode()},
        {"/v1/models": b"HTTP/1.1 500 x\r\n\r\n" + DEEP},
        {"/v1/models": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n[]"},
        {"/v1/models": MODELS, "/admin/model": OK + DEEP},
        {"/v1/models": MODELS, "/admin/model": OK + b"[]"},
        {"/v1/models": MODELS, "/admin/model": OK + b'{"shape": 5}'},
        {
            "/v1/models": MODELS,
            "/admin/model": OK + json.dumps({"shape": {"reduction_chunks": RED}}).encode(),
        },
        {"/v1/models": VLLM, "/server_info": OK + DEEP},
        {"/v1/models": VLLM, "/server_info": b"nothing of HTTP\r\n\r\n"},
    ],
)
def test_whatever_answers_at_the_start_is_refused_in_a_sentence(answers):
    wanted = ServerRequirements(preset("qwen3:micro", 100), "float32", "portable", "none", 512, PARAMS)
    with server(answers) as client, pytest.raises(UserError) as error:
        asyncio.run(find_server(client, wanted))
    assert str(error.value).startswith(client.url) and str(error.value).isprintable() and len(str(error.value)) < 1500
