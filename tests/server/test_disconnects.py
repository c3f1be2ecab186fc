"""Clients that go away give their pages back at once."""

import asyncio
import contextlib
import random
import socket
import threading
import time

import httpx
import pytest

LONG = dict(max_tokens=490, ignore_eos=True)


@pytest.mark.parametrize(
    ("stream", "shape"),
    [(False, {"prompt": "x"}), (True, {"prompt": "x", "n": 3}), (False, {"prompt": ["x", "y"], "n": 2})],
)
def test_pages_are_free_after_one_more_step(server, monkeypatch, stream, shape):
    engine, generations = server.engine, server.service.engine_loop.generations
    step, late = engine.step, []

    def watched_step():
        late.append(bool(engine.has_work and not generations))
        return step()

    monkeypatch.setattr(engine, "step", watched_step)  # the engine's own, and notes for whom it runs
    client = server.http()
    before = engine.statistics.tokens_sampled

    def ask():
        body = LONG | shape | {"stream": stream}
        with contextlib.suppress(httpx.HTTPError), client.stream("POST", "/v1/completions", json=body) as answer:
            answer.read()

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_until(lambda: engine.statistics.tokens_sampled > before + 20)
    for connection in client._transport._pool.connections:
        connection._connection._network_stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    thread.join()
    server.wait_until(server.all_pages_free, seconds=3)
    client.close()
    assert len(late) < 400, "it went on to the end"
    # The event loop hears of the client while a step runs; the one that has just begun may be the last.
    assert sum(late) <= 1


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
