"""What equal bits in every layout cost: sums in C chunks against one chain, and against PyTorch's own operators.

    step     a training step of 512 tokens, one process: C = 1, 2, 4, 8, and the library's operators
             (F.linear and scaled_dot_product_attention in the same model)
    decode   a decode step of 32 sequences of 256 tokens, one process: C = 1, 2, 4, 8, and the library's product
             (without its attention, which reads no pages)
    order    a training step of four micro-batches of 128 tokens with gradients summed in one order
             (train.deterministic_layout) and as they come: in one process, and on two ranks of one thread each (FSDP,
             tensor, context, pipeline)
    ranks    two tensor-parallel ranks of one thread each: step and decode with C = 2, 4, 8, and with the library's
             operators and its reduce-scatter or all-reduce; and one process of two threads with C = 2

At 110M, or with --size 0.6b at Qwen3-0.6B's shape, for which each part takes some 12 GiB. All sides of a part run in
one process in turns, or in alternating starts, and the best of five counts: what else the machine does only adds.
Ratios are to C = 1, on two ranks to C = 2.
Run: python benchmarks/parity_cost.py [--part step] [--size 110m] [--dtype float32]
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

LENGTH, TIMES, STARTS = 512, 5, 2
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


def shape(size: str) -> Any:
    """Qwen3-0.6B, or 110M parameters as Qwen3 has them."""
    from lockstep.model import ModelConfig, preset

    if size == "0.6b":
        return preset("qwen3:0.6b")
    return ModelConfig(
        "qwen3", 32000, dim=768, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64, intermediate_size=2048,
        qk_norm="head",
    )  # fmt: skip


def tokens_of(config: Any, rows: int, length: int) -> list[list[int]]:
    drawn: list[list[int]] = torch.randint(
        config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return drawn


def in_chunks(step: Callable[[], object], model: torch.nn.Module, chunks: int) -> Callable[[], object]:
    """The step with sums in so many chunks. All sides share one model, for there is memory for no second one."""

    def stepped() -> None:
        for module in model.modules():
            if hasattr(module, "chunks"):
                module.chunks = chunks
        step()

    return stepped


def world_of(ranks: int) -> Any:
    from lockstep.config import ParallelConfig
    from lockstep.parallel import open_world

    return open_world(ParallelConfig(tensor=ranks), "cpu")


def training_step(size: str, dtype: str, ranks: int = 1) -> tuple[Callable[[], object], torch.nn.Module]:
    from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
    from lockstep.model import initialize
    from lockstep.parallel import parallel_model
    from lockstep.train import Trainer, pack
    from lockstep.train.objective import NextTokenLoss

    world, parallel = world_of(ranks), ParallelConfig(tensor=ranks, reduction_chunks=max(CHUNKS))
    fill = partial(initialize, seed=0)
    model = parallel_model(shape(size), getattr(torch, dtype), world, parallel, CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(learning_rate=1e-4), 100, world)
    row = pack(tokens_of(shape(size), 1, LENGTH))
    return lambda: trainer.step([row], NextTokenLoss(LENGTH - 1)), model


def accumulating_step(size: str, deterministic: bool, dtype: str, layout: str) -> Callable[[], object]:
    from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
    from lockstep.model import initialize
    from lockstep.parallel import open_world, parallel_model
    from lockstep.train import Trainer, pack
    from lockstep.train.context import shard_row
    from lockstep.train.objective import NextTokenLoss

    parallel = ParallelConfig(**LAYOUTS[layout], reduction_chunks=2)
    world = open_world(parallel, "cpu")
    fill = partial(initialize, seed=0)
    model = parallel_model(shape(size), getattr(torch, dtype), world, parallel, CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(learning_rate=1e-4, deterministic_layout=deterministic), 100, world)
    length = LENGTH // MICROBATCHES
    rows = [pack([tokens]) for tokens in tokens_of(shape(size), MICROBATCHES, length)]
    own = [shard_row(row, world) for row in rows[world.data_rank :: world.data_size]]
    return lambda: trainer.step(own, NextTokenLoss(MICROBATCHES * (length - 1)))


def decode_step(size: str, dtype: str, ranks: int = 1) -> tuple[Callable[[], object], torch.nn.Module]:
    from lockstep import Engine, EngineConfig, SamplingParams
    from lockstep.config import ParallelConfig
    from lockstep.model import initialize
    from lockstep.parallel import generator_model

    world, parallel = world_of(ranks), ParallelConfig(tensor=ranks, reduction_chunks=max(CHUNKS))
    model = generator_model(shape(size), getattr(torch, dtype), world, parallel, partial(initialize, seed=0))
    engine = Engine(model, EngineConfig(max_tokens_per_step=SEQUENCES * CONTEXT, max_sequences=SEQUENCES))
    for prompt in tokens_of(shape(size), SEQUENCES, CONTEXT):
        engine.add(prompt, SamplingParams(max_tokens=512, seed=0, ignore_eos=True))
    engine.step()  # the prompts
    return engine.step, model


def library_sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over ranks in the library's order: all rows in decoding, this rank's share of them in training."""
    from lockstep.parallel.exchange import reduce_scatter, rows_are_whole

    if rows_are_whole():
        torch.distributed.all_reduce(x, group=group)
        return x
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    reduce_scatter(out, x.contiguous(), group=group)
    return out


@contextmanager
def library_operators() -> Iterator[None]:
    """PyTorch's product, attention and sums over ranks in place of the invariant ones, in the same model."""
    from unittest.mock import patch

    import torch.nn.functional as F

    from lockstep import ops
    from lockstep.parallel import exchange, operators

    def attend(self: Any, layer: int, q: Any, k: Any, v: Any, terms: Any = None) -> Any:
        parts = []
        for queries, keys, values in zip(*(x.split(LENGTH) for x in (q, k, v))):
            heads = (x.transpose(0, 1)[None] for x in (queries, keys, values))
            parts.append(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(parts)

    def linear(x: Any, weight: Any, chunks: int = 1) -> Any:
        form = ops.FORMS.get(type(weight))
        return F.linear(x, weight) if form is None else form.linear(x, weight, chunks)

    def row_product(x: Any, weight: Any, format: str, chunks: int, group: Any) -> Any:
        return exchange.exchanged(F.linear(x, weight), group, library_sum, exchange.gather_rows)

    import importlib

    with (
        patch.object(ops, "linear", linear),
        patch.object(importlib.import_module("lockstep.ops.logprobs"), "linear", linear),
        patch.object(ops.PackedAttention, "__call__", attend),
        patch.object(operators, "column_product", lambda x, weight, format, group: F.linear(x, weight)),
        patch.object(operators, "row_product", row_product),
        patch.object(operators, "sum_gathered", library_sum),
        patch.object(operators, "sum_rows", library_sum),
    ):
        yield


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


def sides_of(step: Callable[[], object], model: torch.nn.Module, ranks: int = 1) -> dict[str, Callable[[], object]]:
    sides = {f"C = {chunks}": in_chunks(step, model, chunks) for chunks in CHUNKS if chunks >= ranks}
    first = next(iter(sides.values()))

    def library() -> None:
        with library_operators():
            first()

    return sides | {"library": library}


def step(size: str, dtype: str) -> None:
    title = f"training step, {size}, {dtype}, one process"
    report(title, best_in_turns(sides_of(*training_step(size, dtype))), "C = 1")


def decode(size: str, dtype: str) -> None:
    title = f"decode step of {SEQUENCES} sequences, {size}, {dtype}, one process"
    report(title, best_in_turns(sides_of(*decode_step(size, dtype))), "C = 1")


def order(size: str, dtype: str) -> None:
    for name in LAYOUTS:
        seconds = _started("order", size, dtype, 1 if name == "one process" else 2, name)
        report(f"training step of {MICROBATCHES} micro-batches, {size}, {dtype}, {name}", seconds, COME)


def ranks(size: str, dtype: str) -> None:
    for part in ("step", "decode"):
        seconds: dict[str, float] = {}
        for _ in range(STARTS):
            for count in (1, 2):
                for name, own in _started(part, size, dtype, count).items():
                    name = name if count == 2 else f"{name}, one process"
                    seconds[name] = min(seconds.get(name, own), own)
        title = f"{part}, {size}, {dtype}, two ranks of one thread each; one process of two threads"
        report(title, {name: seconds[name] for name in seconds if name != "library, one process"}, "C = 2")


def _started(part: str, size: str, dtype: str, count: int, layout: str = "one process") -> dict[str, float]:
    """Rank 0's best times of a part in fresh processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--one", part, "--size", size, "--dtype", dtype]
    command += ["--ranks", str(count), "--layout", layout]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(count):
        own = common | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 2 // count}
        environment = os.environ | {name: str(value) for name, value in own.items()}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    seconds: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return seconds


def one(part: str, size: str, dtype: str, count: int, layout: str) -> None:
    torch.set_num_threads(2 // count)
    if part == "order":
        sides = {name: accumulating_step(size, ordered, dtype, layout) for name, ordered in SIDES.items()}
    else:
        sides = sides_of(*(training_step if part == "step" else decode_step)(size, dtype, count), 2)
    print(json.dumps(best_in_turns(sides)))


PARTS = {"step": step, "decode": decode, "order": order, "ranks": ranks}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), default="")
    parser.add_argument("--size", choices=("110m", "0.6b"), default="110m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--one", choices=("step", "decode", "order"), default="", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--layout", choices=LAYOUTS, default="one process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.size, options.dtype, options.ranks, options.layout)
    for name, part in PARTS.items():
        if not options.one and options.part in ("", name):
            part(options.size, options.dtype)
