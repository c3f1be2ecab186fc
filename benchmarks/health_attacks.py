"""What `health.py` attacks a server with; each function is called again and again, from several threads.

A request that could be answered from what an earlier one has left (a compiled grammar) differs from that one.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer admin"}
TEMPLATE = """\
{%- if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
Call them as <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}"""
"""A chat template with tools."""


def post(port: int, path: str, body: bytes | dict[str, object], headers: dict[str, str] = JSON) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def of_bodies(*bodies: bytes, path: str = "") -> Callable[[int, Path], None]:
    """Sends them in turn to the path; by default to completions or chats."""

    def attack(port: int, _: Path) -> None:
        for body in bodies:
            post(port, path or ("/v1/chat/completions" if b'"messages"' in body else "/v1/completions"), body)

    return attack


def streams(port: int, _: Path) -> None:
    post(port, "/v1/completions", {"prompt": "x", "n": 8, "max_tokens": 400, "ignore_eos": True, "stream": True})


def unread(port: int, _: Path) -> None:
    """Asks for much, and reads nothing."""
    body = json.dumps({"prompt": "x", "n": 30, "max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": 5})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(2)


def slow(port: int, _: Path) -> None:
    """A hundred connections whose heads come byte by byte."""
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for byte in b"POST /v1/completions HTTP/1.1":
        for connection in connections:
            with suppress(OSError):
                connection.sendall(bytes([byte]))
        time.sleep(0.05)
    for connection in connections:
        connection.close()


def folders(port: int, folder: Path) -> None:
    """Damaged weights in turn."""
    damaged = {"vocab_size": '{"vocab_size": "abc"}', "deep": "[" * 10**6, "layers": '{"num_hidden_layers": 2000000}'}
    for name, config in damaged.items():
        target = folder.parent / f"{name}-{threading.get_ident()}"
        if not target.exists():
            shutil.copytree(folder, target)
            old = json.loads((folder / "config.json").read_text())
            (target / "config.json").write_text(json.dumps(old | json.loads(config)) if name != "deep" else config)
        assert post(port, "/admin/weights", {"path": str(target), "version": 2}, JSON | KEY) == 400


def mangled(port: int, _: Path) -> None:
    """Bytes of a request, some flipped."""
    body = b'{"prompt": "abc", "max_tokens": 2, "n": 2}'
    whole = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = bytearray(whole + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
    for _ in range(3):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    with socket.create_connection(("127.0.0.1", port)) as connection, suppress(OSError):
        connection.settimeout(1)
        connection.sendall(data)
        while connection.recv(65536):
            pass


def byte_by_byte(port: int, _: Path) -> None:
    """A body in chunks of one byte, of six times its size on the wire."""
    body = b'{"prompt": "x", "max_tokens": 1, "user": "' + b"y" * 400_000 + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        connection.recv(100)


fresh = itertools.count()
"""Numbers that make a body differ from all before."""


def properties(count: int) -> dict[str, Any]:
    """Of a JSON schema, of all kinds and with new names."""
    kinds = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "maximum": 999},
        {"enum": ["one", "two", "three"]},
    ]
    kinds += [{"type": "array", "items": {"type": "number"}}, {"type": "string", "pattern": "^[a-z]{3,9}$"}]
    return {f"key_{next(fresh)}": kinds[number % len(kinds)] for number in range(count)}


def schema(count: int) -> dict[str, Any]:
    found = properties(count)
    return {"type": "object", "properties": found, "required": [*found], "additionalProperties": False}


def tool(properties: int, **fields: Any) -> dict[str, Any]:
    """In the form of Responses."""
    return {"type": "function", "name": f"tool_{next(fresh)}", "parameters": schema(properties), **fields}


def in_chats(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {k: v for k, v in each.items() if k != "type"}} for each in tools]


def in_messages(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": each["name"], "input_schema": each["parameters"]} for each in tools]


def schemas(port: int, _: Path) -> None:
    """Of content, which is in no prompt, and of tools."""
    for count in (300, 2000):
        content = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(count)}}
        post(port, "/v1/chat/completions", {"messages": [USER], "max_tokens": 4, "response_format": content})
    tools = in_chats([tool(10, strict=True) for _ in range(20)])
    body = {"messages": [USER], "tools": tools, "tool_choice": "required", "max_tokens": 4}
    post(port, "/v1/chat/completions", body)


def tools(port: int, _: Path) -> None:
    """A thousand, to each API: too long for the context, and just short enough."""
    for count in (2, 0):
        many = [tool(count, strict=True) for _ in range(1000 if count else 100)]
        post(port, "/v1/chat/completions", {"messages": [USER], "tools": in_chats(many), "max_tokens": 1})
        post(port, "/v1/responses", {"input": "word", "tools": many, "max_output_tokens": 1})
        post(port, "/v1/messages", {"messages": [USER], "tools": in_messages(many), "max_tokens": 1})


def grammars(port: int, _: Path) -> None:
    """Expressions and grammars that take long to compile, or to follow."""
    number = next(fresh)
    rules = "".join(f"r{i}: /[a-z]{{1,9}}/ r{i + 1}?\n" for i in range(2000))
    outputs: list[dict[str, Any]] = [
        {"regex": f"{number}(a|ab|abc){{1,500}}[a-z]{{1000}}"},
        {"regex": f"{number}(.*a.*b){{30}}.{{900}}"},
        {"choice": [f"{number} {each} " + "x" * (each % 40) for each in range(4000)]},
        {"grammar": f"start: /{number}/ r0\n{rules}r2000: /z/"},
    ]
    for each in outputs:
        post(port, "/v1/completions", {"prompt": "x", "max_tokens": 40, "structured_outputs": each})


def history(port: int, _: Path) -> None:
    """10 MB, announced and in chunks."""
    body = b'{"messages": [' + b",".join([json.dumps(USER).encode()] * 260_000) + b"]}"
    with suppress(ConnectionError):  # the server closes while it is sent
        post(port, "/v1/chat/completions", body)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        parts = (body[place : place + 65536] for place in range(0, len(body), 65536))
        connection.request("POST", "/v1/responses", parts, JSON, encode_chunked=True)
        connection.getresponse().read()
    finally:
        connection.close()


def conversations(port: int, _: Path) -> None:
    """Long ones, an unknown one, and one that is stored and continued."""
    item = {"role": "user", "content": [{"type": "input_text", "text": "word " * 20}] * 3}
    post(port, "/v1/responses", {"input": [item] * 4000, "max_output_tokens": 1})
    post(port, "/v1/responses", {"input": "word " * 100_000, "previous_response_id": "resp_unknown"})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        previous = None
        for _ in range(3):
            body = {"input": [USER] * 1000, "previous_response_id": previous, "max_output_tokens": 1}
            connection.request("POST", "/v1/responses", json.dumps(body), JSON)
            previous = json.loads(connection.getresponse().read()).get("id")
    finally:
        connection.close()


def adapters(port: int, _: Path) -> None:
    """One that is loaded, named and unloaded."""
    name = f"adapter_{next(fresh)}"
    post(port, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "adapter"}, JSON | KEY)
    post(port, "/v1/completions", {"model": name, "prompt": "x", "max_tokens": 4})
    post(port, "/v1/unload_lora_adapter", {"lora_name": name}, JSON | KEY)


STOPS = [chr(98 + i) * 256 for i in range(15)] + ["a" * 255 + "z"]
MANY = b"[" + b"{}," * 30_000 + b"{}]"
USER = {"role": "user", "content": "word"}
CHATS = json.dumps({"messages": [{"role": "user", "content": "word " * 40}] * 4000, "max_tokens": 1}).encode()
TEXT = {"type": "text", "text": "word"}
BLOCKS = json.dumps({"messages": [{"role": "user", "content": [TEXT] * 16_000}], "max_tokens": 1}).encode()
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1]}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [TEXT] * 2}
CALLED = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
TURNS = [USER, *CALLED * 2000]
ATTACKS: dict[str, Callable[[int, Path], None]] = {
    "nothing": lambda *_: time.sleep(1),
    "32 streams": streams,
    "bodies of many values": of_bodies(b'{"prompt": ' + MANY + b"}", b'{"prompt": [' + b"1," * 260_000 + b'"x"]}'),
    "bodies of 1.4 and 1.9 MiB": of_bodies(*(b'{"prompt": [' + b"{}, " * n + b"{}]}" for n in (350_000, 490_000))),
    "texts and numbers of 2 MiB": of_bodies(
        b'{"prompt": "' + b"\\n" * 1_000_000 + b'"}',
        b'{"prompt": "x", "user": [' + b"9" * 4000 + (b"," + b"9" * 4000) * 500 + b"]}",
    ),
    "long texts": of_bodies(
        *(json.dumps({"prompt": text, "max_tokens": 1}).encode() for text in ("ab " * 900, ["word " * 400] * 64))
    ),
    "long chats": of_bodies(CHATS),
    "long messages": of_bodies(CHATS, BLOCKS, b'{"messages": ' + MANY + b"}", path="/v1/messages"),
    "long results of tools": of_bodies(
        json.dumps({"messages": TURNS, "max_tokens": 1}).encode(),
        json.dumps({"messages": TURNS}).encode(),
        path="/v1/messages",
    ),
    "long responses": conversations,
    "1,000 tools": tools,
    "large schemas": schemas,
    "expensive grammars": grammars,
    "10 MB of history": history,
    "long texts as tokens": of_bodies(
        json.dumps({"prompt": "a word " * 12_000, "return_token_strs": True}).encode(), CHATS, path="/tokenize"
    ),
    "long lists of tokens": of_bodies(b'{"tokens": [70' + b",70" * (2**18 - 1) + b"]}", path="/detokenize"),
    "log-probabilities of prompts": of_bodies(
        b'{"prompt": [70' + b",71" * 20_000 + b'], "max_tokens": 1, "prompt_logprobs": 20}',
        b'{"prompt": [70' + b",71" * 20_000 + b'], "max_tokens": 0, "echo": true, "logprobs": 20}',
    ),
    "adapters": adapters,
    "samples begun elsewhere": of_bodies(
        *(
            json.dumps({"prompt": "x", "max_tokens": n, "seed": 1, "begun": [[70] * (n - 1)], "stop": STOPS}).encode()
            for n in (2000, 100_000)
        )
    ),
    "chunks of a byte": byte_by_byte,
    "long answers": of_bodies(b'{"prompt": "x", "n": 32, "max_tokens": 400, "ignore_eos": true, "logprobs": 20}'),
    "clients that do not read": unread,
    "heads byte by byte": slow,
    "damaged weights": folders,
    "flipped bits": mangled,
}
