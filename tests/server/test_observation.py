"""Health, metrics, request ids and the access log tell what happens."""

import contextlib
import json
import logging
import re

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lockstep.generate.server import app
from tests.server.conftest import Panic, running_server


def test_metrics_count_what_was_done(server):
    prompt, names = [4] * 65, ["cache_pages_total", "prompt_tokens_reused_total", "tokens_sampled_total"]
    names += ["time_to_first_token_seconds_count", "time_per_output_token_seconds_count"]
    names += ['requests_aborted_total{"reason": "disconnected"}']
    names += [f'requests_total{{"route": "/v1/completions", "status": "{status}"}}' for status in (200, 400)]

    def counted():
        families = [sample for f in text_string_to_metric_families(server.metrics()) for sample in f.samples]
        found = {f"{s.name}{json.dumps(s.labels) if s.labels else ''}": s.value for s in families}
        return {name: found.get(f"lockstep_{name}", 0.0) for name in names}, found

    server.engine.weights_changed(0)  # nothing is cached of earlier requests
    before, _ = counted()
    server.complete(prompt=prompt, n=4, max_tokens=6, ignore_eos=True)
    server.complete(prompt="x", max_tokens=-1)
    with server.http() as client:
        body = dict(prompt="x", max_tokens=400, stream=True, ignore_eos=True)
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert server.metric("lockstep_sequences_running") == 1
            assert server.metric("lockstep_cache_pages_used") > 0
        server.wait_until(server.all_pages_free)
        server.wait_until(lambda: counted()[0][names[5]] > before[names[5]])
    after, found = counted()
    new = [after[name] - before[name] for name in names]
    # Three of four samples find the 64 tokens of the full pages that the first has computed, and copy the last one.
    assert new[1] == 3 * 65 and new[3:] == [2, 4, 1, 2, 1] and after[names[0]] == server.engine.allocator.num_pages
    assert after[names[2]] == server.engine.statistics.tokens_sampled
    assert found["lockstep_cache_pages_used"] == 0 and 0 < found["lockstep_prefix_hit_rate"] < 1
    assert {"lockstep_sequences_waiting", "lockstep_preemptions_total", "lockstep_tokens_guessed_total"} <= found.keys()


def test_a_path_that_a_client_makes_up_makes_no_time_series(server):
    with server.http() as client:
        for path in ("/v1/a", "/v1/b", "/c%00d"):
            assert client.get(path).status_code == 404
        text = client.get("/metrics").text
    routes = set(re.findall(r'lockstep_requests_total\{route="([^"]*)"', text))
    known = {route.path for route in app.routes.routes}
    assert routes <= {*known, "/openapi.json", "other"}


def test_a_request_id_is_echoed_or_made(server):
    with server.http() as client:
        assert client.get("/health", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
        for unfit in ("", "x" * 200, "two words"):
            made = client.get("/health", headers={"X-Request-Id": unfit}).headers["x-request-id"]
            assert re.fullmatch("req-[0-9a-f]{24}", made)
        failed = client.post("/v1/completions", json={}, headers={"X-Request-Id": "bad"})
        assert failed.status_code == 400 and failed.headers["x-request-id"] == "bad"


def test_the_access_log_has_a_line_of_json_for_every_request(server, caplog):
    with caplog.at_level(logging.INFO, "lockstep.access"):
        with server.http() as client:
            # A line is written after its answer: what an earlier test asked for may still come.
            client.get("/first")
            server.wait_until(lambda: any("/first" in message for message in caplog.messages))
            caplog.clear()
            client.post("/v1/completions", json=dict(prompt=[1, 2], max_tokens=5, ignore_eos=True))
            client.get("/nowhere")
            with contextlib.suppress(httpx.TimeoutException):
                client.post("/v1/completions", json=dict(prompt="x", max_tokens=490, ignore_eos=True), timeout=0.1)
        lines = []
        server.wait_until(lambda: lines.extend(caplog.messages[len(lines) :]) or len(lines) == 3)
    one, two, three = map(json.loads, lines)
    assert (one["status"], one["prompt_tokens"], one["completion_tokens"]) == (200, 2, 5)
    assert (two["status"], two["path"]) == (404, "/nowhere")
    assert (three["status"], three["aborted"]) == (499, "disconnected") and three["completion_tokens"] < 490


def test_a_step_that_fails_ends_all_requests_and_the_health_and_a_model_without_a_template_completes(
    model_folder, monkeypatch
):
    with running_server(model_folder) as running, running.http() as client:
        answer = running.chat("x")
        assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]
        assert running.complete(prompt="x", max_tokens=2).status_code == 200
        body = dict(prompt="x", max_tokens=100, ignore_eos=True)
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)

            def broken():
                raise Panic("the device is gone")

            monkeypatch.setattr(running.engine, "step", broken)  # no real device can be lost on demand
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        monkeypatch.undo()
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "engine_failed"
        assert client.post("/v1/completions", json=body).status_code == 503
        assert running.metric('lockstep_requests_aborted_total{reason="failure"}') == 2
        assert running.all_pages_free()
