"""`lockstep serve` as a process: signals, log lines, keys from the environment, refusals at start."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

from lockstep.model import load_model, save_model
from tests.server.conftest import server_process

LONG = dict(prompt="x", max_tokens=400, ignore_eos=True, stream=True)


def _refused(*options):
    command = [sys.executable, "-m", "lockstep", "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_server_for_others_without_a_key_a_model_or_a_port_does_not_start(chat_folder):
    taken = socket.create_server(("127.0.0.1", 0))
    for options, message in [
        (["--model", str(chat_folder), "--host", "0.0.0.0"], "set an API key"),
        (["--model", "/nowhere"], "/nowhere: no such folder"),
        (["--model", str(chat_folder), "--port", str(taken.getsockname()[1])], "Address already in use"),
    ]:
        result = _refused(*options)
        assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    taken.close()


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_during_a_stream_lets_it_finish_and_exits_0(chat_folder, sent):
    with server_process(chat_folder, environment={"LOCKSTEP_API_KEY": "k1"}) as (process, url):
        headers = {"Authorization": "Bearer k1", "X-Request-Id": "abc-1"}
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, headers=headers, timeout=30) as answer:
            assert answer.headers["x-request-id"] == "abc-1"
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(sent)
            seen = _health_until_503(url)
            late = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers={"Authorization": "Bearer k1"})
            assert late.status_code == 503
            rest = [line for line in lines if line]
        assert seen == 503 and rest[-1] == "data: [DONE]" and len(rest) > 100
        output, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
    assert "Traceback" not in errors
    log = [json.loads(line) for line in output.splitlines()]
    line = next(line for line in log if line["request_id"] == "abc-1")
    assert line["status"] == 200 and line["completion_tokens"] == 400 and line["stream"] and line["aborted"] is None
    assert 0 < line["first_token_seconds"] < line["seconds"]


def _health_until_503(url):
    for _ in range(200):
        status = httpx.get(f"{url}/health").status_code
        if status == 503:
            break
        time.sleep(0.005)
    return status


def test_the_engine_imports_without_the_servers_packages():
    script = "import sys\nfor name in ('fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'pydantic', 'tyro'):\n"
    script += "    sys.modules[name] = None\nimport lockstep.cli, lockstep.generate, lockstep.rl\n"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def _sequences(url):
    """In the engine, running or waiting."""
    found = re.findall(r"^lockstep_sequences_(?:running|waiting) (\S+)$", httpx.get(f"{url}/metrics").text, flags=re.M)
    return sum(map(float, found))


@pytest.mark.parametrize(
    ("options", "signals"), [pytest.param(["--shutdown-seconds", "0.2"], 1, marks=pytest.mark.slow), ([], 2)]
)
def test_what_outlasts_the_shutdown_or_a_second_signal_is_aborted_and_told_so(chat_folder, options, signals):
    with server_process(chat_folder, *options) as (process, url):
        answers = []

        def ask():
            body = dict(prompt="x", max_tokens=450, n=100, ignore_eos=True)
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30))

        thread = threading.Thread(target=ask)
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"n": 100}, timeout=30) as stream:
            thread.start()
            lines = stream.iter_lines()
            next(lines)
            while _sequences(url) <= 100:  # until the other request is in the engine too
                time.sleep(0.01)
            started = time.monotonic()
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
            rest = [line for line in lines if line]
        thread.join()
        output, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and time.monotonic() - started < 8, errors
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"
    log = [json.loads(line) for line in output.splitlines()]
    asked = [line for line in log if line["path"] == "/v1/completions"]
    assert sorted((line["status"], line["aborted"]) for line in asked) == [(200, "shutdown"), (503, "shutdown")]
    assert "Traceback" not in errors


def test_two_ranks_answer_as_one_process_does_through_new_weights_and_a_signal(chat_folder, tmp_path):
    config = json.loads((chat_folder / "config.json").read_text()) | {"reduction_chunks": 2}
    folders = []
    for name, scale in (("first", 1.0), ("second", 1.5)):
        folder = tmp_path / name
        shutil.copytree(chat_folder, folder)
        (folder / "config.json").write_text(json.dumps(config))
        model = load_model(folder)
        with torch.no_grad():
            model.embed_tokens.weight.mul_(scale)
        save_model(model, folder)
        folders.append(folder)
    answers = []
    for ranks in (1, 2):
        with server_process(folders[0], environment={"LOCKSTEP_ADMIN_KEY": "k"}, ranks=ranks) as (process, url):
            own = [_answered(url, seed=1, n=2, top_p=0.9), _answered(url, seed=2, temperature=0.7)]
            assert httpx.post(f"{url}/v1/completions", json={"prompt": [10**6]}).status_code == 400
            for folder, status in ((tmp_path / "nowhere", 400), (folders[1], 200)):
                keys = {"Authorization": "Bearer k"}
                loaded = httpx.post(f"{url}/admin/weights", json={"path": str(folder)}, headers=keys, timeout=30)
                assert loaded.status_code == status, loaded.text
            answers.append([*own, _answered(url, seed=3)])
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url}/health")
    assert answers[0] == answers[1] and answers[0][0] != answers[0][2]


def _answered(url, **asked):
    body = {"prompt": "Hello there", "max_tokens": 16, "logprobs": 2, "ignore_eos": True, **asked}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_a_rank_that_dies_ends_its_requests_with_an_error_and_then_the_server(chat_folder):
    with server_process(chat_folder, ranks=2) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(_pid_of_rank(process.pid, 1), signal.SIGKILL)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_failed"
        _, errors = process.communicate(timeout=25)  # before torchrun's patience of 30 s is over
        assert process.returncode == 1 and "Exception in thread" not in errors


def _pid_of_rank(parent, rank):
    """The process among `parent`'s children to which torchrun gave this rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or ended meanwhile
            child = f"\nPPid:\t{parent}\n" in (folder / "status").read_text()
            if child and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
    raise AssertionError(f"no rank {rank}")
