"""How long `/health` takes while a server is attacked: what docs/security.md promises, timed from another process.

The server is `lockstep serve` with `qwen3:tiny` and random weights; each attack comes over four connections at a time,
from a process of its own. On few cores a server's time includes the wait for one: compare with `nothing` and with
`32 streams`.

Run: python benchmarks/health.py   (about three minutes)
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SECONDS = 8.0
"""Of each attack."""
EVERY = 0.01
CONNECTIONS = 4
JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer admin"}


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


STOPS = [chr(98 + i) * 256 for i in range(15)] + ["a" * 255 + "z"]
MANY = b"[" + b"{}," * 30_000 + b"{}]"
CHATS = json.dumps({"messages": [{"role": "user", "content": "word " * 40}] * 4000, "max_tokens": 1}).encode()
TEXT = {"type": "text", "text": "word"}
BLOCKS = json.dumps({"messages": [{"role": "user", "content": [TEXT] * 16_000}], "max_tokens": 1}).encode()
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


def attack(name: str, port: int, folder: Path) -> None:
    """From CONNECTIONS threads until it is ended; the work is the server's, so one process is enough."""

    def forever() -> None:
        while True:
            with suppress(OSError, http.client.HTTPException):
                ATTACKS[name](port, folder)

    for _ in range(CONNECTIONS - 1):
        threading.Thread(target=forever, daemon=True).start()
    forever()


def waits(port: int, seconds: float) -> list[float]:
    """Of `/health` over one connection, in seconds. Raises AssertionError unless each answer is 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        took.append(time.perf_counter() - began)
        assert answer.status == 200, answer.status
        time.sleep(EVERY)
    connection.close()
    return took


@contextmanager
def served(folder: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lockstep", "serve", "--model", str(folder), "--port", str(port)]
    command += ["--engine.cache-tokens", "65536", "--client-seconds", "5"]
    server = subprocess.Popen(
        command, env=os.environ | {"LOCKSTEP_ADMIN_KEY": "admin"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        while True:
            assert server.poll() is None, server.stderr.read().decode() if server.stderr else ""
            with suppress(OSError):
                waits(port, 1.0)
                post(port, "/v1/completions", {"prompt": "x", "max_tokens": 2})
                break
            time.sleep(0.2)
        yield port
    finally:
        server.send_signal(signal.SIGINT)
        server.send_signal(signal.SIGINT)
        server.wait(60)


def main() -> None:
    from lockstep import build_model, save_model
    from lockstep.data import TextSource, train_bpe
    from lockstep.model import preset

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        tokenizer = train_bpe(TextSource().__iter__(), 2048)
        save_model(build_model(preset("qwen3:tiny", 2048, (tokenizer.eos_id or 0,)), dtype="float32"), folder)
        tokenizer.save(folder)
        (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
        print(f"/health in milliseconds ({len(os.sched_getaffinity(0))} cores)\n{'':26}  p50    p99    max  answers")
        with served(folder) as port:
            for name in ATTACKS:
                attacker = subprocess.Popen([sys.executable, __file__, "--attack", name, str(port), str(folder)])
                time.sleep(1)
                took = sorted(waits(port, SECONDS))
                assert attacker.poll() is None, f"{name} has ended"
                attacker.kill()
                attacker.wait()
                p50, p99 = statistics.median(took), took[int(len(took) * 0.99)]
                print(f"{name:26} {p50 * 1e3:6.1f} {p99 * 1e3:6.1f} {took[-1] * 1e3:6.1f} {len(took):8d}", flush=True)
                time.sleep(3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        attack(given.attack[0], int(given.attack[1]), Path(given.attack[2]))
    else:
        main()
