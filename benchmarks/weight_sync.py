"""How long new weights take from the trainer's ranks to the generators, against a copy of as many bytes in memory.

Two processes of one thread each, bfloat16, models of 5M to 0.6B parameters. Colocated: both train and generate (FSDP 2,
also with all but one layer frozen, TP 2 and two stages of a pipeline). Separate: one trains, and the other reads what
it publishes. GB/s are bytes of the weights that a rank receives, in seconds of the whole transfer: rounding, sending,
checksums of all tensors, and the copy into the generator's.

Run: python benchmarks/weight_sync.py [--size 110M] [--plot weight_sync.png]
     python benchmarks/weight_sync.py --steps 5       share of a real GRPO step (32 completions of 64 tokens), 110M
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TIMES = 7
KEY = bytes(32)
FROZEN = "FSDP 2, one layer trained"
LAYOUTS: dict[str, dict[str, int]] = {"FSDP 2": {}, FROZEN: {}, "TP 2": {"tensor": 2}, "PP 2": {"pipeline": 2}}
SEPARATE = "separate"
WAYS: dict[str, list[str]] = {
    "FSDP 2": [],
    "TP 2": ["--parallel.tensor", "2"],
    "TP 2, float32": ["--parallel.tensor", "2", "--dtype", "float32"],
    "separate": ["--actors.generators", "1", "--actors.threads", "1"],
}
"""How a GRPO run is laid out on two processes."""
SIZES: dict[str, dict[str, int]] = {
    "5M": dict(
        vocab_size=8192, dim=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=768
    ),
    "30M": dict(
        vocab_size=32000, dim=384, num_layers=8, num_heads=6, num_kv_heads=2, head_dim=64, intermediate_size=1024
    ),
    "110M": dict(
        vocab_size=32000, dim=768, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64, intermediate_size=2048
    ),
    "0.6B": dict(
        vocab_size=151936, dim=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, intermediate_size=3072
    ),
}  # fmt: skip


def measure(size: str, layout: str) -> dict[str, float]:
    """This rank's medians, in seconds; runs on each of the two ranks."""
    import torch

    from lockstep.config import CompileConfig, ParallelConfig
    from lockstep.host_memory import keep_freed_memory
    from lockstep.model import ModelConfig, initialize
    from lockstep.model.shard import local_part
    from lockstep.parallel import close_world, generator_model, open_world, parallel_model
    from lockstep.rl.weights.transfer import WeightTransfer

    torch.set_num_threads(1)
    keep_freed_memory()  # as a run's trainer does
    parallel = ParallelConfig(**LAYOUTS[layout])
    world = open_world(parallel, "cpu")
    shape = ModelConfig("qwen3", qk_norm="head", tie_embeddings=True, **SIZES[size])  # type: ignore[arg-type]
    fill = partial(initialize, seed=0)
    trained = parallel_model(shape, torch.bfloat16, world, parallel, CompileConfig(), fill)
    generator = generator_model(shape, torch.bfloat16, world, parallel, fill)
    tensors = dict(trained.named_parameters())
    frozen = [name for name in tensors if layout == FROZEN and not name.startswith("layers.0.")]
    transfer = WeightTransfer(tensors, generator, world, frozen=frozen)
    parts = [local_part(parameter.detach())[0] for parameter in generator.parameters()]
    copies = [torch.empty_like(part) for part in parts]

    def copy() -> None:
        for part, room in zip(parts, copies):
            room.copy_(part)

    found = {"bytes": float(sum(part.nbytes for part in parts))}
    for name, work in (("transfer", partial(transfer, 1)), ("copy", copy)):
        seconds = []
        for _ in range(TIMES):
            world.barrier()
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        found[name] = statistics.median(seconds[1:])
    found["rank"] = world.rank
    close_world(world)
    return found


def measure_separate(size: str) -> dict[str, float]:
    """Medians of one trainer that publishes to one replica, in seconds; runs in the trainer's process."""
    import torch

    from lockstep.host_memory import keep_freed_memory
    from lockstep.parallel import World
    from lockstep.rl.weights.server import WeightServer

    torch.set_num_threads(1)
    keep_freed_memory()
    model = _model(size)
    parameters = dict(model.named_parameters())
    found = {
        "bytes": float(sum(parameter.nbytes for parameter in parameters.values())),
        "copy": _copy_seconds([parameter.detach() for parameter in parameters.values()]),
    }
    weight_server = WeightServer(parameters, torch.bfloat16, World(torch.device("cpu")), KEY)
    command = [sys.executable, __file__, "--replica", "--size", size]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdin is not None and replica.stdout is not None
        replica.stdout.readline()

        def transfer() -> None:
            assert replica.stdin is not None and replica.stdout is not None
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.view(-1)[0] += 1  # what has not changed is not read again
            replica.stdin.write(json.dumps(weight_server.publish(1)) + "\n")
            replica.stdin.flush()
            assert replica.stdout.readline() == "loaded\n"

        found["transfer"] = _median(transfer)
        replica.stdin.close()
    weight_server.close()
    return found


def load_all(size: str) -> None:
    """The replica's process: loads the manifest in each line of its input."""
    import torch

    from lockstep.parallel import World
    from lockstep.rl.weights.reader import WeightReader

    torch.set_num_threads(1)
    reader = WeightReader(_model(size), World(torch.device("cpu")), KEY)
    print("ready", flush=True)
    for line in sys.stdin:
        print(reader.load(json.loads(line)).outcome, flush=True)


def _model(size: str) -> Any:
    from lockstep.model import ModelConfig, build_model

    return build_model(ModelConfig("qwen3", qk_norm="head", tie_embeddings=True, **SIZES[size]), dtype="bfloat16")  # type: ignore[arg-type]


def _copy_seconds(parts: list[Any]) -> float:
    copies = [part.clone() for part in parts]

    def copy() -> None:
        for part, room in zip(parts, copies):
            room.copy_(part)

    return _median(copy)


def _median(work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def run(size: str, layout: str) -> dict[str, float]:
    """Rank 0's medians."""
    if layout == SEPARATE:
        command = [sys.executable, __file__, "--rank-of", layout, "--size", size]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        alone: dict[str, float] = json.loads(done.stdout)
        return alone
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank-of", layout, "--size", size],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in ranks]
    found: dict[str, float] = json.loads(outputs[0].strip().splitlines()[-1])
    return found


def share_of_step(way: str, steps: int) -> dict[str, float]:
    """Median seconds of the steps of a GRPO run at 110M but for the first, of its weight syncs, and their share."""
    from grpo import GROUP, NEW, PROMPTS, TASK

    from lockstep import build_model, save_model
    from lockstep.data import named_tokenizer
    from lockstep.model import ModelConfig
    from lockstep.observe import read_metrics

    with tempfile.TemporaryDirectory() as scratch:
        # Nothing ends a completion, so that all steps are of one size.
        shape = ModelConfig("qwen3", qk_norm="head", tie_embeddings=True, **SIZES["110M"])  # type: ignore[arg-type]
        save_model(build_model(shape, dtype="bfloat16"), f"{scratch}/model")
        named_tokenizer("byte", ()).save(Path(f"{scratch}/model"))
        (Path(scratch) / "task.py").write_text(TASK)
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"] if way != "separate" else []
        command = [
            sys.executable, *ranks, "-m", "lockstep", "rl", "--model", f"{scratch}/model", "--dtype", "bfloat16",
            "--environment", f"{scratch}/task.py:Letters", "--output", f"{scratch}/run", "--steps", str(steps + 1),
            "--prompts-per-step", str(PROMPTS), "--samples-per-prompt", str(GROUP), "--max-new-tokens", str(NEW),
            "--validation-examples", "1", "--validation-every", "0", "--checkpoint.every", "0",
            "--train.learning-rate", "1e-5", *WAYS[way],
        ]  # fmt: skip
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, check=True)
        lines = read_metrics(Path(scratch) / "run" / "metrics.jsonl")[2:]
    found = {name: statistics.median(line[f"time/{name}"] for line in lines) for name in ("step", "weight_sync")}
    return found | {"share": statistics.median(line["time/weight_sync"] / line["time/step"] for line in lines)}


def plot(results: dict[str, dict[str, dict[str, Any]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for layout in (*LAYOUTS, SEPARATE):
        points = [(of[layout]["bytes"] / 2**20, of[layout]["transfer"]) for of in results.values()]
        axes.plot(*zip(*points), marker="o", label=layout)
    copies = [(of["FSDP 2"]["bytes"] / 2**20, of["FSDP 2"]["copy"]) for of in results.values()]
    axes.plot(*zip(*copies), marker="o", linestyle="--", color="gray", label="copy in memory")
    axes.set(xscale="log", yscale="log", xlabel="weights of a rank's generator, MiB", ylabel="seconds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="one size instead of all")
    parser.add_argument("--plot", type=Path, help="picture to write")
    parser.add_argument("--keep", type=Path, help="file of what was measured; what stands there is not measured again")
    parser.add_argument("--steps", type=int, default=0, help="steps of a GRPO run, whose share a sync is")
    parser.add_argument("--way", choices=WAYS, help="one way instead of all, with --steps")
    parser.add_argument("--rank-of", choices=[*LAYOUTS, SEPARATE], help=argparse.SUPPRESS)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        load_all(options.size)
        return
    if options.rank_of:
        way = options.rank_of
        found = measure_separate(options.size) if way == SEPARATE else measure(options.size, way)
        print(json.dumps(found))
        return
    if options.steps:
        for way in [options.way] if options.way else WAYS:
            share = share_of_step(way, options.steps)
            print(
                f"{way:>16} {share['weight_sync']:8.3f} s of {share['step']:7.2f} s: {share['share']:.1%}", flush=True
            )
        return
    kept = options.keep and options.keep.is_file()
    results: dict[str, dict[str, dict[str, Any]]] = json.loads(options.keep.read_text()) if kept else {}
    print(f"{'model':>6} {'layout':>25} {'MiB':>8} {'transfer':>10} {'GB/s':>6} {'copy':>9} {'GB/s':>6}")
    for size in [options.size] if options.size else SIZES:
        for layout in (*LAYOUTS, SEPARATE):
            of_size = results.setdefault(size, {})
            found = of_size[layout] = of_size.get(layout) or run(size, layout)
            if options.keep:
                options.keep.write_text(json.dumps(results, indent=1))
            rates = [found["bytes"] / found[name] / 1e9 for name in ("transfer", "copy")]
            print(
                f"{size:>6} {layout:>25} {found['bytes'] / 2**20:8.1f} {found['transfer']:8.3f} s {rates[0]:6.2f} "
                f"{found['copy']:7.3f} s {rates[1]:6.2f}",
                flush=True,
            )
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
