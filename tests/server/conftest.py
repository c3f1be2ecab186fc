"""A real server on a loopback port, in a thread of this process or in a process of its own."""

import asyncio
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import openai
import pytest

from lockstep import build_model, save_model
from lockstep.config import EngineConfig, ServeConfig
from lockstep.data import load_tokenizer
from lockstep.model import preset
from tests.data.call_templates import write_call_family

ENGINE = EngineConfig(max_tokens_per_step=512, max_sequences=64, cache_tokens=16384)
TEMPLATE = (
    "{% for message in messages %}\n"
    "  {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Running:
    """A server in a thread, and what tests ask of it."""

    def __init__(self, service, server):
        self.service = service
        self.engine = service.engine
        self.server = server
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    def http(self, **options):
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def openai(self, key="none"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def complete(self, **body):
        with self.http() as client:
            return client.post("/v1/completions", json=body)

    def chat(self, messages="hi", **body):
        """messages: a list, or what a user says."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        with self.http() as client:
            return client.post("/v1/chat/completions", json={"messages": messages, **body})

    def stream(self, **body):
        """The chunks of a streamed completion."""
        with self.http() as client, client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def connect(self):
        """A socket to the server, for what no client sends."""
        connection = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])))
        connection.settimeout(10)
        return connection

    def metrics(self):
        with self.http() as client:
            return client.get("/metrics").text

    def metric(self, name):
        return float(re.search(rf"^{re.escape(name)} (\S+)$", self.metrics(), flags=re.M)[1])

    def all_pages_free(self):
        return self.engine.allocator.num_free == self.engine.allocator.num_pages and not self.engine.has_work

    def wait_until(self, condition, seconds=20.0):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "waited in vain"
            time.sleep(0.005)


class Panic(BaseException):
    """As a panic of a library in Rust arrives: no Exception."""


@contextmanager
def in_a_thread(server):
    """Runs a server until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()))
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(server.begin_end)
        loop.call_soon_threadsafe(server.begin_end)
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def running_server(folder, **options):
    from lockstep.generate.server.app import create_app
    from lockstep.generate.server.serve import Server, build_service

    config = ServeConfig(model=str(folder), **({"engine": ENGINE, "port": 0} | options))
    service = build_service(config, folder)
    server = Server(create_app(service), service.config, service.limits)
    with in_a_thread(server):
        running = Running(service, server)
        yield running
        running.wait_until(running.all_pages_free)


@contextmanager
def server_process(folder, *options, environment=None, ranks=1, module="lockstep"):
    """(process, its URL): `lockstep serve` as a user starts it, by torchrun on several ranks. module: what is run in
    place of `lockstep`."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    if torchrun:
        options = ("--parallel.tensor", str(ranks), *options)
    command = [sys.executable, *torchrun, "-m", module, "serve", "--model", str(folder), "--port", "0", *options]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | (environment or {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)
    try:
        lines = []
        while not (found := re.search(r"running on (http://\S+)", lines[-1] if lines else "")):
            line = process.stderr.readline()
            assert line, "".join(lines)
            lines.append(line)
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="package")
def chat_folder(tmp_path_factory, bpe_tokenizer):
    """The small model with a chat template, and weights that make its tokens depend on what was said."""
    import torch

    from lockstep.model import build_model, preset, save_model

    folder = tmp_path_factory.mktemp("chat")
    config = preset("qwen3:micro", bpe_tokenizer.vocab_size, (bpe_tokenizer.eos_id,))
    config = dataclasses.replace(config, max_positions=512)
    model = build_model(config, dtype="bfloat16", seed=1)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(2)
    save_model(model, folder)
    bpe_tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="package")
def server(chat_folder):
    with running_server(chat_folder, model_name="small", admin_key="secret") as running:
        yield running


@pytest.fixture(scope="package")
def client(server):
    with server.openai() as client:
        yield client


@pytest.fixture
def say(monkeypatch):
    """say(server, parts): the model's next tokens are those of the parts of a text; returns these.

    ends: the sample ends with them by itself, whatever max_tokens is; send ignore_eos.
    """
    left, options = [], {}

    def replaced(event):
        reason = "stop" if options["ends"] and len(left) == 1 else event.finish_reason
        return dataclasses.replace(event, token_id=left.pop(0), finish_reason=reason)

    def begin(server, parts, ends=False):
        script = [token for part in parts for token in server.service.tokenizer.encode(part)]
        server.wait_until(server.all_pages_free)  # an earlier answer may not have been aborted yet
        left[:], options["ends"] = script, ends
        if "step" not in vars(server.engine):
            step = server.engine.step
            monkeypatch.setattr(server.engine, "step", lambda: [replaced(event) if left else event for event in step()])
        return script

    return begin


@pytest.fixture(scope="module")
def serving(tmp_path_factory, bpe_tokenizer):
    """serving(family): a running server of a small model with random weights and that family's template."""
    open_servers = {}

    def of(name):
        if name not in open_servers:
            folder = tmp_path_factory.mktemp("families") / name
            write_call_family(folder, name, bpe_tokenizer)
            tokenizer = load_tokenizer(folder)
            config = preset("qwen3:micro", tokenizer.vocab_size + tokenizer.vocab_size % 2, (tokenizer.eos_id,))
            save_model(build_model(config, dtype="float32", seed=1), folder)
            manager = running_server(folder, model_name="small", dtype="float32")
            open_servers[name] = manager, manager.__enter__()
        return open_servers[name][1]

    yield of
    for manager, _ in open_servers.values():
        manager.__exit__(None, None, None)
