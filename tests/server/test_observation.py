"""Health, metrics, request ids and the access log tell what happens."""

import contextlib
import json
import logging
import re

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import running_server


def test_metrics_count_what_was_done(chat_folder):
    with running_server(chat_folder) as running:
        prompt = [4] * 65
        running.complete(prompt=prompt, n=4, max_tokens=6, ignore_eos=True)
        running.complete(prompt="x", max_tokens=-1)
        with running.http() as client:
            body = dict(prompt="x", max_tokens=400, stream=True, ignore_eos=True)
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                assert running.metric("lockstep_sequences_running") == 1
                assert running.metric("lockstep_cache_pages_used") > 0
            running.wait_until(running.all_pages_free)
            text = client.get("/metrics").text
        names = {family.name for family in text_string_to_metric_families(text)}
        assert {"lockstep_sequences_waiting", "lockstep_preemptions", "lockstep_tokens_sampled"} <= names
        assert running.metric("lockstep_cache_pages_used") == 0
        assert running.metric("lockstep_cache_pages_total") == running.engine.allocator.num_pages
        # Three of four samples find the 64 tokens of the full pages that the first has computed.
        assert running.metric("lockstep_prompt_tokens_reused_total") == 3 * 65
        assert 0.7 < running.metric("lockstep_prefix_hit_rate") < 0.75
        assert running.metric("lockstep_time_to_first_token_seconds_count") == 2
        assert running.metric("lockstep_time_per_output_token_seconds_count") == 4
        assert running.metric('lockstep_requests_aborted_total{reason="disconnected"}') == 1
        assert running.metric('lockstep_requests_total{route="/v1/completions",status="200"}') == 2
        assert running.metric('lockstep_requests_total{route="/v1/completions",status="400"}') == 1
        assert running.metric("lockstep_tokens_sampled_total") == running.engine.statistics.tokens_sampled


def test_a_path_that_a_client_makes_up_makes_no_time_series(server):
    with server.http() as client:
        for path in ("/v1/a", "/v1/b", "/c%00d"):
            assert client.get(path).status_code == 404
        text = client.get("/metrics").text
    routes = set(re.findall(r'lockstep_requests_total\{route="([^"]*)"', text))
    known = {"/v1/models", "/v1/models/{name:path}", "/v1/completions", "/v1/chat/completions", "/metrics", "/health"}
    assert routes <= {*known, "/admin/weights", "/openapi.json", "other"}


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


def test_a_step_that_raises_fails_all_requests_and_the_health(chat_folder, monkeypatch):
    with running_server(chat_folder) as running, running.http() as client:
        body = dict(prompt="x", max_tokens=490, ignore_eos=True)
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)

            def broken():
                raise RuntimeError("the device is gone")

            monkeypatch.setattr(running.engine, "step", broken)  # no real device can be lost on demand
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        monkeypatch.undo()
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "engine_failed"
        assert client.post("/v1/completions", json=body).status_code == 503
        assert running.metric('lockstep_requests_aborted_total{reason="failure"}') == 2
        assert running.all_pages_free()


def test_a_model_without_a_template_still_completes(model_folder):
    with running_server(model_folder) as running, running.http() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]
        assert running.complete(prompt="x", max_tokens=2).status_code == 200
