"""Clients that go away give their pages back at once."""

import json

import pytest

LONG = dict(max_tokens=490, ignore_eos=True)


@pytest.mark.parametrize(
    "shape", [{"prompt": "x"}, {"prompt": "x", "n": 3, "stream": True}, {"prompt": ["x", "y"], "n": 2}]
)
def test_pages_are_free_soon_after_a_client_has_gone(server, shape):
    body = json.dumps(LONG | shape).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    before = server.engine.statistics.tokens_sampled
    with server.connect() as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        server.wait_until(lambda: server.engine.statistics.tokens_sampled > before + 20)
    server.wait_until(server.all_pages_free)
    assert server.engine.statistics.tokens_sampled - before < 490, "it did not go on to the end"
