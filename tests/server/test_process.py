"""`lockstep serve`: signals, log lines, keys from the environment, refusals at start, and several ranks."""

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from lockstep.cli import main
from lockstep.model import load_model, save_model
from tests.server.conftest import running_server, server_process

LONG = dict(prompt="x", max_tokens=400, ignore_eos=True, stream=True)


def test_a_server_for_others_without_a_key_a_model_or_a_port_does_not_start(chat_folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options, message in [
            (["--model", str(chat_folder), "--host", "0.0.0.0"], "set an API key"),
            (["--model", "/nowhere"], "/nowhere: no such folder"),
            (["--model", str(chat_folder), "--port", str(taken.getsockname()[1])], "Address already in use"),
        ]:
            assert main(["serve", *options]) == 2
            assert message in capsys.readouterr().err


def test_a_signal_during_a_stream_lets_it_finish_and_exits_0(chat_folder):
    with server_process(chat_folder, environment={"LOCKSTEP_API_KEY": "k1"}) as (process, url):
        headers = {"Authorization": "Bearer k1", "X-Request-Id": "abc-1"}
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, headers=headers, timeout=30) as answer:
            assert answer.headers["x-request-id"] == "abc-1"
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
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


@pytest.mark.parametrize(("options", "signals"), [({"shutdown_seconds": 0.2}, 1), ({}, 2)])
def test_what_outlasts_the_shutdown_or_a_second_signal_is_aborted_and_told_so(chat_folder, options, signals):
    with running_server(chat_folder, **options) as running, running.http() as client, ThreadPoolExecutor(1) as pool:
        with client.stream("POST", "/v1/completions", json=LONG | {"n": 40}) as stream:
            lines = stream.iter_lines()
            next(lines)
            whole = pool.submit(running.complete, **LONG | {"n": 40, "stream": False})
            running.wait_until(lambda: running.service.limits.sequences == 80)
            for number in (signal.SIGINT, signal.SIGTERM)[:signals]:
                running.server.handle_exit(number, None)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert whole.result().status_code == 503 and whole.result().json()["error"]["code"] == "shutting_down"


@pytest.mark.slow
def test_two_ranks_answer_as_one_process_does_through_new_weights_and_end_if_one_dies(chat_folder, tmp_path):
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
            if ranks == 1:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)
                with pytest.raises(httpx.TransportError):
                    httpx.get(f"{url}/health")
            else:
                _let_a_rank_die(process, url)
    assert answers[0] == answers[1] and answers[0][0] != answers[0][2]


def _answered(url, **asked):
    body = {"prompt": "Hello there", "max_tokens": 16, "logprobs": 2, "ignore_eos": True, **asked}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def _let_a_rank_die(process, url):
    """Its requests end with an error, and then the server does."""
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
