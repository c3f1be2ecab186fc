"""Models by their Hugging Face name, downloaded by the real client from a hub that listens here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c0ffee" + "0" * 34
NAME = "acme/tiny-model"


class Hub(ThreadingHTTPServer):
    """Serves one folder as one model, in the hub's protocol; `asked` lists the paths of all requests."""

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.asked = folder, list[str]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "HF_HUB_DISABLE_XET": "1"}


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self, body: bool = True) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        if path == f"/api/models/{NAME}/revision/nowhere":
            return self._answer(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/acme/gated"):
            return self._answer(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        if path in (f"/api/models/{NAME}", *(f"/api/models/{NAME}/revision/{r}" for r in ("main", "v1", COMMIT))):
            siblings = [{"rfilename": p.name} for p in self.server.folder.iterdir()]
            return self._json({"id": NAME, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}, body)
        if path == f"/api/models/{NAME}/tree/{COMMIT}":
            return self._json([self._entry(p) for p in self.server.folder.iterdir()], body)
        file = self.server.folder / path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
        if path.startswith(f"/{NAME}/resolve/") and file.is_file():
            data = file.read_bytes()
            return self._answer(200, data, body, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT})
        return self._answer(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def _entry(self, path: Path) -> dict[str, object]:
        return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _digest(path.read_bytes())}

    def _json(self, value: object, body: bool) -> None:
        self._answer(200, json.dumps(value).encode(), body, {"Content-Type": "application/json"})

    def _answer(self, code: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(model_folder) -> Iterator[Hub]:
    server = Hub(Path(model_folder))
    yield server
    server.shutdown()
    server.server_close()


def _run(code: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its settings when it is imported."""
    settings = {**os.environ, "HF_HOME": str(home), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings, timeout=120)


LOAD = """
import sys, torch, lockstep
from lockstep.data import load_tokenizer
model = lockstep.load_model(sys.argv[1] if len(sys.argv) > 1 else "acme/tiny-model")
load_tokenizer("acme/tiny-model@v1")
print(float(sum(p.double().sum() for p in model.state_dict().values())))
"""


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_once_and_then_needs_no_network(hub, model_folder, tmp_path):
    from lockstep import load_model

    first = _run(LOAD, tmp_path, **hub.environment)
    assert first.returncode == 0, first.stderr
    expected = float(sum(p.double().sum() for p in load_model(model_folder).state_dict().values()))
    assert float(first.stdout) == expected
    assert sum("model.safetensors" in path for path in hub.asked) >= 1

    hub.asked.clear()
    again = _run(LOAD, tmp_path, HF_HUB_OFFLINE="1", **hub.environment)
    assert again.returncode == 0, again.stderr
    assert float(again.stdout) == expected and hub.asked == []


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


@pytest.mark.parametrize(
    "environment",
    [{"HF_HUB_OFFLINE": "1"}, pytest.param({"HF_ENDPOINT": "http://127.0.0.1:9"}, marks=pytest.mark.slow)],
)
def test_without_a_network_a_model_that_is_not_in_the_cache_is_named(tmp_path, environment):
    code = f"import sys; from lockstep.cli import main; sys.exit(main(['convert', {NAME!r}, 'converted']))"
    result = _run(code, tmp_path, **environment)
    assert result.returncode == 2 and NAME in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert "the hub cannot be reached" in result.stderr


@pytest.mark.slow
def test_every_command_asks_the_hub_for_a_model_by_its_name(model_folder, tmp_path):
    other = str(model_folder)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 4)
    task = ["--environment", "digit_sum", "--output", str(tmp_path / "run")]
    data = ["--data", str(pairs), "--output", str(tmp_path / "run")]
    commands = [
        ["pretrain", "--model", NAME, *data],
        ["sft", "--model", NAME, *data],
        ["dpo", "--model", NAME, *data],
        ["dpo", "--model", other, "--reference", NAME, *data],
        ["reward-model", "--model", NAME, *data],
        ["rl", "--model", NAME, *task],
        ["rl", "--model", other, "--reward-model", NAME, *task],
        ["rl", "--model", other, "--algorithm", "distillation", "--teacher", NAME, *task],
        ["rl", "--model", other, "--engine.draft", "model", "--engine.draft-model", NAME, *task],
        ["eval", "--model", NAME, *task],
        ["generate", "--model", NAME, "--prompt", "a"],
        ["chat", "--model", NAME],
        ["serve", "--model", NAME],
        ["parity", "--model", NAME],
        ["convert", NAME, str(tmp_path / "converted")],
        ["data", "tokenize", *data, "--tokenizer", NAME],
    ]
    code = f"""
import sys
from lockstep.cli import main
for command in {commands}:
    print(main(command), flush=True)
    print("next", file=sys.stderr, flush=True)
"""
    result = _run(code, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert result.stdout.split() == ["2"] * len(commands), result.stderr
    for command, said in zip(commands, result.stderr.split("next\n")):
        assert f"{NAME}: " in said and "the hub cannot be reached" in said and "Traceback" not in said, command
