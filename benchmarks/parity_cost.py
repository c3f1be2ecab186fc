"""What equal bits in every layout cost: sums in C chunks against one chain, and against PyTorch's own operators.

    step     a training step at 110M, 512 tokens, one process: C = 1, 2, 4, 8, and the library's operators
             (F.linear and scaled_dot_product_attention in the same model)
    decode   a decode step at 110M of 32 sequences of 256 tokens, one process: C = 1, 2, 4, 8
    order    a training step at 110M of four micro-batches of 128 tokens with gradients summed in one order
             (train.deterministic_layout) and as they come: in one process, and on two ranks of one thread each (FSDP,
             tensor, context, pipeline)
    ranks    two tensor-parallel ranks of one thread each against one process of two threads: step and decode

All sides of a part run in one process in turns, or in alternating starts, and the best of five counts: what else the
machine does only adds. Ratios are to C = 1. Run: python benchmarks/parity_cost.py [--part step] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

LENGTH, VOCAB, TIMES = 512, 32000, 5
MICROBATCHES = 4
SEQUENCES, CONTEXT = 32, 256
CHUNKS = (1, 2, 4, 8)
COME = "as they come"
SIDES = {COME: False, "in one order": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "two FSDP ranks": {},
    "two tensor ranks": {"tensor": 2},
    "two context ranks": {"context": 2},
    "two stages": {"pipeline": 2},
}


def shape(chunks: int) -> Any:
    """110M parameters as Qwen3 has them."""
    from lockstep.model import ModelConfig

    return ModelConfig(
        "qwen3", VOCAB, dim=768, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64, intermediate_size=2048,
        qk_norm=True, reduction_chunks=chunks,
    )  # fmt: skip


def world_of(ranks: int) -> Any:
    from lockstep.config import ParallelConfig
    from lockstep.parallel import open_world

    return open_world(ParallelConfig(tensor=ranks), "cpu")


def training_step(chunks: int, dtype: str, ranks: int = 1) -> Callable[[], object]:
    from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
    from lockstep.model import initialize
    from lockstep.parallel import parallel_model
    from lockstep.train import Trainer, pack
    from lockstep.train.pretrain import NextTokenLoss

    world, parallel = world_of(ranks), ParallelConfig(tensor=ranks, reduction_chunks=chunks)
    fill = partial(initialize, seed=0)
    model = parallel_model(shape(chunks), getattr(torch, dtype), world, parallel, CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(learning_rate=1e-4), 100, world)
    draw = torch.Generator().manual_seed(0)
    row = pack(torch.randint(VOCAB, (1, LENGTH), generator=draw).tolist())
    return lambda: trainer.step([row], NextTokenLoss(LENGTH - 1))


def accumulating_step(deterministic: bool, dtype: str, layout: str) -> Callable[[], object]:
    from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
    from lockstep.model import initialize
    from lockstep.parallel import open_world, parallel_model
    from lockstep.train import Trainer, pack
    from lockstep.train.context import shard_row
    from lockstep.train.pretrain import NextTokenLoss

    parallel = ParallelConfig(**LAYOUTS[layout], reduction_chunks=2)
    world = open_world(parallel, "cpu")
    fill = partial(initialize, seed=0)
    model = parallel_model(shape(2), getattr(torch, dtype), world, parallel, CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(learning_rate=1e-4, deterministic_layout=deterministic), 100, world)
    draw = torch.Generator().manual_seed(0)
    length = LENGTH // MICROBATCHES
    rows = [pack([tokens]) for tokens in torch.randint(VOCAB, (MICROBATCHES, length), generator=draw).tolist()]
    own = [shard_row(row, world) for row in rows[world.data_rank :: world.data_size]]
    return lambda: trainer.step(own, NextTokenLoss(MICROBATCHES * (length - 1)))


def decode_step(chunks: int, dtype: str, ranks: int = 1) -> Callable[[], object]:
    from lockstep import Engine, EngineConfig, SamplingParams
    from lockstep.config import ParallelConfig
    from lockstep.model import initialize
    from lockstep.parallel import generator_model

    world, parallel = world_of(ranks), ParallelConfig(tensor=ranks, reduction_chunks=chunks)
    model = generator_model(shape(chunks), getattr(torch, dtype), world, parallel, partial(initialize, seed=0))
    engine = Engine(model, EngineConfig(max_tokens_per_step=SEQUENCES * CONTEXT, max_sequences=SEQUENCES))
    draw = torch.Generator().manual_seed(0)
    for prompt in torch.randint(VOCAB, (SEQUENCES, CONTEXT), generator=draw).tolist():
        engine.add(prompt, SamplingParams(max_tokens=512, seed=0, ignore_eos=True))
    engine.step()  # the prompts
    return engine.step


@contextmanager
def library_operators() -> Iterator[None]:
    """PyTorch's product and attention in place of the invariant ones, in the same model."""
    import torch.nn.functional as F

    from lockstep import ops

    def attend(self: Any, layer: int, q: Any, k: Any, v: Any) -> Any:
        parts = []
        for queries, keys, values in zip(*(x.split(LENGTH) for x in (q, k, v))):
            heads = (x.transpose(0, 1)[None] for x in (queries, keys, values))
            parts.append(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(parts)

    import importlib

    exact = ops.linear, ops.PackedAttention.__call__, importlib.import_module("lockstep.ops.logprobs").linear
    logprobs = importlib.import_module("lockstep.ops.logprobs")
    ops.linear = logprobs.linear = lambda x, weight, chunks=1: F.linear(x, weight)  # type: ignore[assignment]
    ops.PackedAttention.__call__ = attend  # type: ignore[method-assign]
    try:
        yield
    finally:
        ops.linear, ops.PackedAttention.__call__, logprobs.linear = exact  # type: ignore[method-assign]


def best_in_turns(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each side, the least of `TIMES`, one after the other again and again."""
    best = dict.fromkeys(sides, float("inf"))
    for turn in range(TIMES + 1):
        for name, step in sides.items():
            began = time.perf_counter()
            step()
            if turn:  # the first one warms up
                best[name] = min(best[name], time.perf_counter() - began)
    return best


def report(title: str, seconds: dict[str, float], base: str) -> None:
    print(f"\n{title}")
    for name, own in seconds.items():
        print(f"  {name:28} {own * 1000:9.1f} ms   {own / seconds[base]:.3f}", flush=True)


def step(dtype: str) -> None:
    sides: dict[str, Callable[[], object]] = {f"C = {chunks}": training_step(chunks, dtype) for chunks in CHUNKS}
    plain = training_step(1, dtype)

    def library() -> None:
        with library_operators():
            plain()

    report(f"training step, {dtype}, one process", best_in_turns(sides | {"library": library}), "C = 1")


def decode(dtype: str) -> None:
    sides = {f"C = {chunks}": decode_step(chunks, dtype) for chunks in CHUNKS}
    report(f"decode step of {SEQUENCES} sequences, {dtype}, one process", best_in_turns(sides), "C = 1")


def order(dtype: str) -> None:
    for name in LAYOUTS:
        seconds = _started("order", dtype, 1 if name == "one process" else 2, name)
        report(f"training step of {MICROBATCHES} micro-batches, {dtype}, {name}", seconds, COME)


def ranks(dtype: str) -> None:
    for part in ("step", "decode"):
        seconds = {name: float("inf") for name in ("one process, two threads", "two ranks, one thread each")}
        for _ in range(3):
            for name, count in zip(seconds, (1, 2)):
                seconds[name] = min(seconds[name], _started(part, dtype, count)["own"])
        report(f"{part}, {dtype}, C = 2", seconds, "one process, two threads")


def _started(part: str, dtype: str, count: int, layout: str = "one process") -> dict[str, float]:
    """Rank 0's best times of a part in fresh processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--one", part, "--dtype", dtype, "--ranks", str(count), "--layout", layout]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(count):
        own = common | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 2 // count}
        environment = os.environ | {name: str(value) for name, value in own.items()}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    seconds: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return seconds


def one(part: str, dtype: str, count: int, layout: str) -> None:
    torch.set_num_threads(2 // count)
    if part == "order":
        sides = {name: accumulating_step(ordered, dtype, layout) for name, ordered in SIDES.items()}
    else:
        sides = {"own": (training_step if part == "step" else decode_step)(2, dtype, count)}
    print(json.dumps(best_in_turns(sides)))


PARTS = {"step": step, "decode": decode, "order": order, "ranks": ranks}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), default="")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--one", choices=("step", "decode", "order"), default="", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--layout", choices=LAYOUTS, default="one process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.dtype, options.ranks, options.layout)
    for name, part in PARTS.items():
        if not options.one and options.part in ("", name):
            part(options.dtype)
