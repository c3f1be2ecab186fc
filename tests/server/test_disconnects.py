"""Clients that go away give their pages back at once."""

import asyncio
import json
import random
import socket
import time

import httpx
import pytest

LONG = dict(max_tokens=490, ignore_eos=True)


@pytest.mark.parametrize(
    "shape", [{"prompt": "x"}, {"prompt": "x", "n": 3, "stream": True}, {"prompt": ["x", "y"], "n": 2}]
)
def test_pages_are_free_soon_after_a_client_has_gone(server, shape):
    body = json.dumps(LONG | shape).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    before = server.engine.statistics.tokens_sampled
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        server.wait_until(lambda: server.engine.statistics.tokens_sampled > before + 20)
    server.wait_until(server.all_pages_free)
    assert server.engine.statistics.tokens_sampled - before < 490, "it did not go on to the end"


def test_100_streams_of_which_many_go_away_leave_every_page_free(server):
    draw = random.Random(7)
    outcomes = {"done": 0, "left": 0, "refused": 0}

    async def ask(client, seed):
        stay = draw.choice([None, 0, draw.randint(1, 12)])
        body = dict(
            prompt=[draw.randrange(512) for _ in range(draw.randint(1, 60))],
            max_tokens=draw.randint(5, 25),
            n=draw.choice([1, 1, 3]),
            seed=seed,
            stream=True,
            ignore_eos=True,
        )
        await asyncio.sleep(draw.random() * 0.5)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                outcomes["refused"] += 1
                return
            count = 0
            async for line in answer.aiter_lines():
                count += bool(line)
                if stay is not None and count > stay:
                    outcomes["left"] += 1
                    return
            assert line == "" and count > 1
            outcomes["done"] += 1

    async def load():
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(ask(client, seed) for seed in range(100)))

    started = time.monotonic()
    asyncio.run(load())
    server.wait_until(server.all_pages_free)
    assert outcomes["refused"] == 0 and outcomes["done"] >= 20 and outcomes["left"] >= 20, outcomes
    assert not any(server.engine.allocator.ref_counts) and time.monotonic() - started < 60
    assert server.service.limits.sequences == 0
