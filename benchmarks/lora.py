"""A LoRA step against a step of full fine-tuning: seconds and peak memory, each side in a process of its own.

    python benchmarks/lora.py [--model qwen3:small] [--dtype float32] [--rows 4] [--rank 16] [--rounds 2]

Fresh weights of the preset's shape (qwen3:small has 110M); rows of 512 random tokens, AdamW. Memory is the process's
peak resident size less what it had before the model was made.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path

from peers import best_of

LENGTH, STEPS = 512, 3


def side(options: argparse.Namespace) -> None:
    """Prints the seconds of a step and the bytes that training took."""
    from lockstep.config import TrainConfig
    from lockstep.model import build_model, lora_of, preset
    from lockstep.train import Trainer, pack
    from lockstep.train.objective import NextTokenLoss

    shape = preset(options.model)
    if options.side == "lora":
        shape = replace(shape, lora=lora_of(shape, options.rank, 2.0 * options.rank, ("*_proj",)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer = Trainer(build_model(shape, options.dtype), TrainConfig(learning_rate=1e-4), 100)
    draw = random.Random(0)
    rows = [[draw.randrange(shape.vocab_size) for _ in range(LENGTH)] for _ in range(options.rows)]
    loss, seconds = NextTokenLoss(options.rows * (LENGTH - 1)), []
    for _ in range(STEPS + 1):  # the first one warms up
        began = time.perf_counter()
        trainer.step([pack(rows)], loss)
        seconds.append(time.perf_counter() - began)
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    trained = sum(master.numel() for master in trainer.optimizer.masters.values())
    print(json.dumps({"seconds": statistics.median(seconds[1:]), "bytes": peak, "trained": trained}))


def processor() -> str:
    """Its name, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3:small")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--rows", type=int, default=4, help=f"sequences of {LENGTH} tokens a step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side, in turn")
    parser.add_argument("--side", choices=("full", "lora"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side(options)
        return
    arguments = [
        part for name in ("model", "dtype", "rows", "rank") for part in (f"--{name}", str(vars(options)[name]))
    ]
    best = best_of(str(Path(__file__)), arguments, ["full", "lora"], options.rounds)
    print(f"{options.model}, {options.dtype}, {options.rows} x {LENGTH} tokens, rank {options.rank}")
    print(f"{processor()}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}")
    for name, found in best.items():
        memory = f"{found['bytes'] / 2**30:6.2f} GiB"
        print(f"{name:5} {found['seconds']:7.2f} s a step, {memory}, {found['trained']:,} trained")
    full, lora = best["full"], best["lora"]
    time_share, memory_share = (lora[what] / full[what] for what in ("seconds", "bytes"))
    print(f"LoRA takes {time_share:.2f} of the time and {memory_share:.2f} of the memory")


if __name__ == "__main__":
    main()
