"""How long `/health` takes while a server is attacked: what docs/security.md promises, timed from another process.

The server is `lockstep serve` with `qwen3:tiny` and random weights; each attack comes over four connections at a time,
from a process of its own. On few cores a server's time includes the wait for one: compare with `nothing` and with
`32 streams`.

Run: python benchmarks/health.py [ATTACK …]   (all, about five minutes, or those whose names are given)
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from health_attacks import ATTACKS, TEMPLATE, post

SECONDS = 8.0
"""Of each attack."""
EVERY = 0.01
CONNECTIONS = 4


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
    command += [
        "--engine.cache-tokens",
        "65536",
        "--client-seconds",
        "5",
        "--lora-folder",
        str(folder.parent / "adapters"),
    ]
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


def main(names: list[str]) -> None:
    from lockstep import build_model, save_model
    from lockstep.data import TextSource, train_bpe
    from lockstep.model import lora_of, preset, save_adapter
    from lockstep.model.adapters import build_adapter

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        tokenizer = train_bpe(TextSource().__iter__(), 2048)
        model = build_model(preset("qwen3:tiny", 2048, (tokenizer.eos_id or 0,)), dtype="float32")
        save_model(model, folder)
        tokenizer.save(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        lora = lora_of(model.config, 8, 16.0, ("*_proj",))
        save_adapter(build_adapter(model, lora, 0), folder.parent / "adapters" / "adapter", folder)
        print(f"/health in milliseconds ({len(os.sched_getaffinity(0))} cores)\n{'':26}  p50    p99    max  answers")
        with served(folder) as port:
            for name in names or ATTACKS:
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
    parser.add_argument("names", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    given = parser.parse_args()
    if unknown := set(given.names) - ATTACKS.keys():
        parser.error(f"no such attack: {min(unknown)}")
    if given.attack:
        attack(given.attack[0], int(given.attack[1]), Path(given.attack[2]))
    else:
        main(given.names)
