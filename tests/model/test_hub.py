"""Models by their Hugging Face name, downloaded by the real client from a hub that listens here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from lockstep.cli import main

COMMIT = "c0ffee" + "0" * 34
NAME = "acme/tiny-model"


class Handler(BaseHTTPRequestHandler):
    """The hub's protocol, as far as the client uses it for one model."""

    def do_GET(self) -> None:
        folder, api, files = self.server.folder, f"/api/models/{NAME}", f"/{NAME}/resolve/{COMMIT}/"
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        file = folder / path.removeprefix(files)
        if path == f"{api}/revision/nowhere":
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/acme/gated"):
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path in (api, *(f"{api}/revision/{revision}" for revision in ("main", "v1", COMMIT))):
            siblings = [{"rfilename": p.name} for p in folder.iterdir()]
            self._json({"id": NAME, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        elif path == f"{api}/tree/{COMMIT}":
            sizes = {p.name: (p.stat().st_size, _digest(p.read_bytes())) for p in folder.iterdir()}
            self._json([{"type": "file", "path": n, "size": size, "oid": oid} for n, (size, oid) in sizes.items()])
        elif path.startswith(files) and file.is_file():
            data = file.read_bytes()
            self._answer(200, data, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, code: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(model_folder):
    """Serves one folder as one model; `asked` lists the paths of all requests."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.folder, server.asked = Path(model_folder), []
        server.environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def _run(code: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its settings when it is imported."""
    settings = {**os.environ, "HF_HOME": str(home), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings, timeout=120)


LOAD = """
import lockstep
from lockstep.data import load_tokenizer
model = lockstep.load_model("acme/tiny-model")
load_tokenizer("acme/tiny-model@v1")
print(float(sum(p.double().sum() for p in model.state_dict().values())))
"""


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_once_and_then_needs_no_network(hub, model_folder, tmp_path):
    from lockstep import load_model

    expected = float(sum(p.double().sum() for p in load_model(model_folder).state_dict().values()))
    for offline in ("0", "1"):
        result = _run(LOAD, tmp_path, HF_HUB_OFFLINE=offline, **hub.environment)
        assert result.returncode == 0, result.stderr
        assert float(result.stdout) == expected and any("safetensors" in path for path in hub.asked) == (offline == "0")
        hub.asked.clear()


@pytest.mark.slow
def test_what_the_hub_does_not_give_is_said_in_a_sentence(hub, tmp_path):
    said = {
        "acme/nothing": "no model with this name",
        f"{NAME}@nowhere": 'no revision "nowhere"',
        "acme/gated": "the model is gated",
        "not a name": "no such folder",
    }
    code = f"""
from lockstep.cli import main
for name in {list(said)}:
    assert main(["convert", name, "converted"]) == 2
"""
    result = _run(code, tmp_path, **hub.environment)
    messages = [line for line in result.stderr.splitlines() if line.startswith("lockstep: ")]
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    for (name, sentence), message in zip(said.items(), messages, strict=True):
        assert message.startswith(f"lockstep: {name}: ") and sentence in message


@pytest.mark.slow
def test_without_a_network_a_model_that_is_not_in_the_cache_is_named(tmp_path):
    code = f"import sys; from lockstep.cli import main; sys.exit(main(['convert', {NAME!r}, 'converted']))"
    result = _run(code, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert result.returncode == 2 and NAME in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert "the hub cannot be reached" in result.stderr


def test_every_command_asks_the_hub_for_a_model_by_its_name(model_folder, tmp_path, monkeypatch, capsys):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 4)
    task = f"--environment digit_sum --output {tmp_path}/run"
    data = f"--data {pairs} --output {tmp_path}/run"
    commands = [
        *(f"{command} --model {NAME} {data}" for command in ("pretrain", "sft", "dpo", "reward-model")),
        f"dpo --model {model_folder} --reference {NAME} {data}",
        f"rl --model {NAME} {task}",
        f"rl --model {model_folder} --reward-model {NAME} {task}",
        f"rl --model {model_folder} --algorithm distillation --teacher {NAME} {task}",
        f"rl --model {model_folder} --engine.draft model --engine.draft-model {NAME} {task}",
        f"eval --model {NAME} {task}",
        f"generate --model {NAME} --prompt a",
        *(f"{command} --model {NAME}" for command in ("chat", "serve", "parity")),
        f"convert {NAME} {tmp_path}/converted",
        f"data tokenize {data} --tokenizer {NAME}",
    ]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for command in commands:
        assert main(command.split()) == 2, command
        said = capsys.readouterr().err
        assert f"{NAME}: " in said and "the hub cannot be reached" in said and "Traceback" not in said, command
