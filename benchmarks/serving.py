"""`lockstep serve` against vLLM's server on the same model, and what HTTP costs against the bare engine; bfloat16.

Requests are streamed completions, tokens in and out with log-probabilities, arriving at random at rising rates. The
client shares the machine's cores with the server, so it is as light as can be: it reads lines and parses them after.

Run: python benchmarks/serving.py [--work large|small] [--servers lockstep vLLM]   (default: all; about fifteen minutes)
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SERVERS = ["lockstep", "vLLM"]
STREAMS = 32
MAX_SEQUENCES = 64
START_SECONDS = 400


@dataclass
class Work:
    """Requests of `length` random tokens that ask for `new` more."""

    preset: str
    vocab: int
    length: int
    new: int
    rates: tuple[float, ...]
    """Requests a second."""
    cache_tokens: int
    seconds: float
    """Of arrivals at each rate."""
    rounds: int
    """Of the streams over HTTP and in the engine, in turn."""

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        """Different ones for each seed, so that no prefix is cached."""
        draw = random.Random(seed)
        return [[draw.randrange(self.vocab - 1) for _ in range(self.length)] for _ in range(count)]


WORKS = {
    "large": Work("qwen3:0.6b", 151936, 128, 64, rates=(0.5, 1, 2), cache_tokens=24576, seconds=16, rounds=2),
    "small": Work("qwen3:tiny", 2048, 64, 64, rates=(4, 16, 32, 64), cache_tokens=65536, seconds=8, rounds=5),
}


@dataclass
class Answer:
    """Times of one stream, in seconds."""

    began: float
    moments: list[float]
    """When each token came."""

    @property
    def first(self) -> float:
        return self.moments[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.moments, self.moments[1:])]


async def ask(port: int, prompt: list[int], new: int) -> Answer:
    """Raises RuntimeError for an answer that is not `new` tokens with their log-probabilities."""
    options = dict(ignore_eos=True, stream=True, logprobs=0, return_token_ids=True, temperature=1.0)
    body = json.dumps({"model": "model", "prompt": prompt, "max_tokens": new, **options})
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    lines = [(time.perf_counter(), line) async for line in reader]
    writer.close()
    events = [(moment, json.loads(line[6:])) for moment, line in lines if line.startswith(b"data: {")]
    choices = [(moment, event["choices"][0]) for moment, event in events if event.get("choices")]
    moments = [moment for moment, choice in choices for _ in choice["token_ids"] or ()]
    if len(moments) != new or not all(c["logprobs"]["token_logprobs"] for _, c in choices if c["token_ids"]):
        raise RuntimeError(f"{len(moments)} tokens instead of {new}: {b''.join(line for _, line in lines)[:1000]!r}")
    return Answer(began, moments)


async def at_rate(port: int, work: Work, rate: float) -> list[Answer]:
    """Arrivals at random, the same for every server."""
    draw = random.Random(int(rate * 1000))
    tasks = []
    for prompt in work.prompts(round(rate * work.seconds), seed=int(rate * 1000)):
        tasks.append(asyncio.create_task(ask(port, prompt, work.new)))
        await asyncio.sleep(draw.expovariate(rate))
    return await asyncio.gather(*tasks)


async def at_once(port: int, work: Work, seed: int) -> list[Answer]:
    """All streams begin together."""
    return await asyncio.gather(*(ask(port, prompt, work.new) for prompt in work.prompts(STREAMS, seed)))


def seconds_of(answers: list[Answer]) -> float:
    return max(a.moments[-1] for a in answers) - min(a.began for a in answers)


@contextmanager
def server(side: str, folder: str, work: Work) -> Iterator[int]:
    """A server in a process of its own, warm; its port."""
    from peers import VLLM_SETTINGS, peer_python

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if side == "lockstep":
        command = [sys.executable, "-m", "lockstep", "serve", "--model", folder, "--model-name", "model"]
        command += ["--engine.cache-tokens", str(work.cache_tokens), "--engine.max-sequences", str(MAX_SEQUENCES)]
    else:
        # Its command line looks for a package named vllm, which the CPU's build is not.
        command = [peer_python("vLLM"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", folder, "--served-model-name", "model"]
        command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", str(MAX_SEQUENCES)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | VLLM_SETTINGS
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            asyncio.run(_warm(port, work, process))
            yield port
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            finally:
                # Of vLLM, workers may be left.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


async def _warm(port: int, work: Work, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            await ask(port, work.prompts(1, seed=-1)[0], 1)
            break
        except (OSError, RuntimeError):
            if process.poll() is not None or time.monotonic() > until:
                raise
            await asyncio.sleep(0.5)
    await asyncio.gather(*(ask(port, prompt, 8) for prompt in work.prompts(STREAMS, seed=-2)))


async def overhead(folder: str, name: str) -> dict[str, float]:
    """Streams over HTTP, and the same work given to the same engine in its own thread, in turn.

    An engine in another process would differ by more than HTTP costs.
    """
    from lockstep import Engine, SamplingParams
    from lockstep.config import EngineConfig, ServeConfig
    from lockstep.generate.server import build_service
    from lockstep.generate.server.serve import Server

    work, http, engine = WORKS[name], [], []
    config = EngineConfig(cache_tokens=work.cache_tokens, max_sequences=MAX_SEQUENCES)
    service = build_service(ServeConfig(folder, port=0, model_name="model", engine=config), Path(folder))
    server = Server(service)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    def bare(engine: Engine, seed: int) -> float:
        began = time.perf_counter()
        engine.generate(work.prompts(STREAMS, seed), SamplingParams(max_tokens=work.new, ignore_eos=True))
        return time.perf_counter() - began

    await service.engine_loop.between_steps(functools.partial(bare, seed=-1))
    for seed in range(work.rounds):
        command = [
            sys.executable,
            __file__,
            "--side",
            "client",
            "--work",
            name,
            "--port",
            str(port),
            "--seed",
            str(seed),
        ]
        client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        http.append(float((await client.communicate())[0]))
        engine.append(await service.engine_loop.between_steps(functools.partial(bare, seed=100 + seed)))
    server.begin_end()
    await serving
    return {"seconds": min(http), "engine": min(engine)}


def write_model(folder: str, work: Work) -> None:
    """Random weights, and a tokenizer in which each token has a text of its own, as both servers write text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from lockstep import build_model, save_model
    from lockstep.model import preset

    save_model(build_model(preset(work.preset, work.vocab, (work.vocab - 1,)), dtype="bfloat16"), folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{i}" for i in range(work.vocab - 1 - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet + words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(f"{folder}/tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))


def report(name: str, sides: list[str]) -> None:
    from peers import best_of

    work = WORKS[name]
    cores = len(os.sched_getaffinity(0))
    print(f"\n{name}: {work.preset}, {work.length} tokens, {work.new} new ({cores} cores; milliseconds: p50 / p99)")
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, work)
        for side in sides:
            with server(side, folder, work) as port:
                for rate in work.rates:
                    print_row(side, work, rate, asyncio.run(at_rate(port, work, rate)))
        if "lockstep" in sides:
            took = best_of(__file__, ["--folder", folder, "--work", name], ["overhead"], 1)["overhead"]
            over = took["seconds"] / took["engine"] - 1
            print(
                f"  {STREAMS} streams: {took['seconds']:.2f} s over HTTP, {took['engine']:.2f} s without: {over:+.1%}"
            )


def print_row(side: str, work: Work, rate: float, answers: list[Answer]) -> None:
    first = _percentiles([a.first for a in answers])
    gap = _percentiles([gap for a in answers for gap in a.gaps])
    tokens = len(answers) * work.new / seconds_of(answers)
    print(
        f"  {side:9} {rate:5g} requests/s {tokens:8.0f} tokens/s   first token {first}   between tokens {gap}",
        flush=True,
    )


def _percentiles(seconds: list[float]) -> str:
    at = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"{1000 * at[49]:6.0f} / {1000 * at[98]:6.0f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=WORKS)
    parser.add_argument("--servers", choices=SERVERS, nargs="+", default=SERVERS)
    parser.add_argument("--side", choices=["overhead", "client"])
    parser.add_argument("--folder")
    parser.add_argument("--port", type=int)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    if options.side == "overhead":
        print(json.dumps(asyncio.run(overhead(options.folder, options.work))))
        return
    if options.side == "client":
        print(seconds_of(asyncio.run(at_once(options.port, WORKS[options.work], options.seed))))
        return
    for name in [options.work] if options.work else WORKS:
        report(name, options.servers)


if __name__ == "__main__":
    main()
