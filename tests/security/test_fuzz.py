"""Damaged requests and files, by fixed seeds: a tenth of what `make test-security` tries."""

import copy
import json
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lockstep import build_model, load_model, save_model
from lockstep.config import EngineConfig
from lockstep.data import load_tokenizer
from lockstep.errors import UserError
from lockstep.generate.server.anthropic_bodies import MessagesRequest
from lockstep.generate.server.app import routes
from lockstep.generate.server.keys import ADMIN_ROUTES
from lockstep.generate.server.protocol import IGNORED, NEUTRAL, ChatRequest, CompletionRequest
from lockstep.generate.server.responses_body import ResponsesRequest
from lockstep.model import load_weights, lora_of, preset, save_adapter
from lockstep.model.adapters import build_adapter
from tests.server.conftest import Running, running_server

REQUESTS = [500, pytest.param(20_000, marks=pytest.mark.slow)]
FILES = [50, pytest.param(2_000, marks=pytest.mark.slow)]

# With the format of Qwen3's calls, but no word of it in the prompt, which has to be short.
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}{{ m.content }}{{ m.reasoning_content }}{{ '<think></think>' if enable_thinking is false }}
{%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}
{%- if never %}<tool_call>{"name": "", "arguments": {}}</tool_call>{% endif %}"""
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1", "is_error": True}]},
]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
STRICT = {"name": "f", "description": "", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": STRICT}
CALLS = [
    {"role": "developer", "content": "x"},
    {"role": "assistant", "content": None, "reasoning_content": "y", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1"}]},
]  # fmt: skip
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "y"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "1"},
]
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
BODIES = [
    ("/v1/completions", {"prompt": "abc", "max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 1, "n": 2, "stream": True, "logprobs": 3}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stop": ["x", "y"], "return_token_ids": True}),
    ("/v1/completions", {"prompt": "a b", "max_tokens": 0, "echo": True, "logprobs": 2, "truncate_prompt_tokens": -1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "n": 1, "best_of": 2, "prompt_logprobs": 1, "min_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "logit_bias": {"3": 1.5}, "repetition_penalty": 1.1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "[a-z]{1,9}x"}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "structured_outputs": {"grammar": 'start: /a+/ b?\nb: "b"'}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "top_k": 3}),
    ("/v1/chat/completions", {"messages": CALLS, "tools": [TOOL], "tool_choice": "required", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": CALLS, "tools": [TOOL], "stream": True, "reasoning_effort": "none"}),
    (
        "/v1/chat/completions",
        {"messages": CALLS[:1], "max_tokens": 2, "response_format": {"type": "json_schema", "json_schema": FORMAT}},
    ),
    (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 2, "include": ["message.output_text.logprobs"], "user": "x"},
    ),
    ("/v1/responses", {"input": ITEMS[:1], "stream": True}),
    ("/v1/responses", {"input": [], "instructions": "x", "text": {"format": {"type": "text"}}, "store": True}),
    ("/v1/responses", {"input": ITEMS, "tools": [{"type": "function"} | STRICT], "reasoning": {"effort": "medium"}}),
    ("/v1/responses", {"input": ITEMS[:1], "text": {"format": FORMAT}, "max_output_tokens": 2, "metadata": {"a": "b"}}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_x"}),
    ("/v1/responses/resp_x", {}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stop_sequences": ["x"]}),
    (
        "/v1/messages",
        {"messages": TURNS[:1], "system": [{"type": "text", "text": "a"}], "max_tokens": 2, "stream": True},
    ),
    ("/v1/messages", {"messages": TURNS, "max_tokens": 2, "tools": [{"name": "f", "input_schema": SCHEMA}]}),
    (
        "/v1/messages",
        {
            "messages": TURNS[:1],
            "max_tokens": 2,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": TURNS[:1], "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}},
    ),
    ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/admin/weights", {"path": "/nowhere", "version": 3}),
    ("/admin/model", {}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "nowhere"}),
    ("/v1/load_lora_adapter", {"lora_name": "adapter", "lora_path": "adapter"}),
    ("/v1/unload_lora_adapter", {"lora_name": "adapter"}),
    ("/", {}),
    ("/health", {}),
    ("/openapi.json", {}),
    ("/metrics", {}),
    ("/v1/models", {}),
    ("/v1/models/x", {}),
]
KINDS = (CompletionRequest, ChatRequest, MessagesRequest, ResponsesRequest)
FIELDS = sorted({name for kind in KINDS for name in kind.model_fields} | {*NEUTRAL, *IGNORED})
JUNK = [
    None, True, -1, 0, 2**31, 2**63, -(2**64), 10**400, 1e-300, 1e308, "", "\0", "\ud800", "a" * 3000, [], {}, [[]],
    [{}], [1, "x"], {"a": {"b": []}}, [-1], [2**40], [[1], ["x"]], "../../etc/passwd", "/dev/zero", "{{ 1/0 }}",
]  # fmt: skip
PIECES = [
    b"\0", b"\r\n", b"\xff\xfe", b"{", b"}", b"[" * 50, b'"', b"1e999", b"\\ud800", b"NaN", b": ", b"chunked", b"-1",
]  # fmt: skip


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, cut out, repeated or put in."""
    for _ in range(draw.choice([1, 1, 2, 5])):
        at, kind = draw.randrange(len(data) + 1), draw.randrange(5)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + draw.randint(1, 20) :]
        elif kind == 2:
            data = data[:at] + draw.choice(PIECES) + data[at:]
        elif kind == 3:
            data = data[:at] + data[max(0, at - 30) : at] * draw.randint(1, 5) + data[at:]
        else:
            data = data[: max(at, len(data) // 2)]
    return data


def places(value: object) -> list[tuple[dict | list, object]]:
    """Each value within a value, as what contains it and its key there."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in pairs for place in [(value, key), *places(inner)]]


def request(seed: int) -> bytes:
    draw = random.Random(seed)
    path, body = draw.choice(BODIES)
    body = copy.deepcopy(body)
    for _ in range(draw.randint(0, 2)):
        if within := draw.random() < 0.4 and places(body):
            container, key = draw.choice(within)
            container[key] = draw.choice(JUNK)
        else:
            body[draw.choice([*FIELDS, *body])] = draw.choice(JUNK)
    content = json.dumps(body).encode()
    if draw.random() < 0.4:
        content = damaged(content, draw)
    method = draw.choice(["GET", "GET", "GET", "DELETE", "POST"]) if not body else "POST"
    key = "Authorization: Bearer secret\r\n" if path.startswith("/admin") or path in ADMIN_ROUTES else ""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode()
    return (damaged(head, draw) if draw.random() < 0.08 else head) + content


def _ask(running: Running, seed: int) -> tuple[bytes, float]:
    began = time.monotonic()
    answer = b""
    with running.connect() as connection:
        connection.settimeout(30)
        try:
            connection.sendall(request(seed))
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            pass
    return answer, time.monotonic() - began


@pytest.fixture(scope="module")
def folder(tmp_path_factory, bpe_tokenizer):
    folder = tmp_path_factory.mktemp("small")
    config = preset("qwen3:micro", bpe_tokenizer.vocab_size, (bpe_tokenizer.eos_id,))
    shape = {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 32}
    save_model(build_model(type(config)(**{**vars(config), **shape, "max_positions": 128}), "float32", seed=1), folder)
    bpe_tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def adapters(folder):
    """A folder with an adapter."""
    home, base = folder.parent / "adapters", load_model(folder)
    save_adapter(build_adapter(base, lora_of(base.config, 2, 4.0, ("*_proj",)), 0), home / "adapter", folder)
    return home


def test_the_bodies_are_of_every_route():
    unreached = [route.path for route in routes.routes if not any(route.path_regex.match(path) for path, _ in BODIES)]
    assert not unreached


@pytest.mark.parametrize("count", REQUESTS)
def test_no_request_breaks_the_server_or_holds_it_up(folder, adapters, count):
    engine = EngineConfig(max_tokens_per_step=256, max_sequences=32, cache_tokens=8192)
    options = dict(engine=engine, admin_key="secret", lora_folder=str(adapters), client_seconds=0.5)
    with running_server(folder, **options) as running:
        expected = running.complete(prompt="abc", max_tokens=5, seed=1).json()["choices"]
        with ThreadPoolExecutor(16) as pool:
            answers = dict(enumerate(pool.map(lambda seed: _ask(running, seed), range(count))))
        statuses = {seed: answer[9:12] for seed, (answer, _) in answers.items()}
        assert not {seed: status for seed, status in statuses.items() if status[:1] == b"5"}
        for seed, (answer, _) in answers.items():
            head, _, content = answer.partition(b"\r\n\r\n")
            if statuses[seed][:1] == b"4" and b"application/json" in head:
                # What a damaged length leaves is answered as a second request.
                found, _ = json.JSONDecoder().raw_decode(content.decode())
                fields = set(found["error"]) - {"details"}
                shape = {"message", "type"} if found.get("type") == "error" else {"message", "type", "param", "code"}
                assert fields == shape, seed
        assert sum(status == b"200" for status in statuses.values()) > count // 10
        assert max(seconds for _, seconds in answers.values()) < 20
        running.wait_until(lambda: not running.service.limits.requests and running.all_pages_free())
        assert running.complete(prompt="abc", max_tokens=5, seed=1).json()["choices"] == expected


NAMES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]


def _damage(folder, draw: random.Random) -> None:
    name = draw.choice(NAMES)
    path, kind = folder / name, draw.randrange(10)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        shutil.copy(folder / draw.choice([n for n in NAMES if n != name]), path)
    elif kind < 5 and name.endswith(".json"):
        values = json.loads(path.read_text())
        for _ in range(draw.randint(1, 3)):
            inner = values
            while isinstance(inner, dict) and inner:
                key = draw.choice(list(inner))
                if not isinstance(inner[key], dict) or draw.random() < 0.3:
                    inner[key] = draw.choice([v for v in JUNK if v != "\ud800"])
                    break
                inner = inner[key]
        path.write_text(json.dumps(values))
    elif kind == 5:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"model.norm.weight": draw.choice([5, "", "..", "../x", "a\0b", "config.json"])}})
        )
    else:
        path.write_bytes(damaged(path.read_bytes(), draw))


@pytest.mark.parametrize("count", FILES)
def test_a_damaged_folder_is_refused_by_name_and_changes_nothing(folder, tmp_path, count):
    model = load_model(folder)
    (tmp_path / "whole").mkdir()
    whole = shutil.copytree(folder, tmp_path / "whole", dirs_exist_ok=True)
    (whole / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    refused = 0
    for seed in range(count):
        target = shutil.copytree(whole, tmp_path / "damaged")
        _damage(target, random.Random(seed))
        began = time.monotonic()
        before = [p.clone() for p in model.parameters()]
        for use in (load_model, load_tokenizer, lambda path: load_weights(model, path)):
            try:
                use(target)
            except UserError as error:
                refused += 1
                assert str(error), seed
                # As bytes: a flipped bit that an earlier folder was taken with may have made a NaN.
                pairs = [(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, model.parameters())]
                changed = not all(torch.equal(a, b) for a, b in pairs)
                assert not changed or use is load_tokenizer, seed
        assert time.monotonic() - began < 10, seed
        shutil.rmtree(target)
    assert refused > count // 3
