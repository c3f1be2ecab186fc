"""A training step on one sequence of 64k tokens: memory and attention of one process and of ranks that share it.

Every process has one thread. Attention is timed in processor time, so that it does not count waiting for other ranks.
Run: python benchmarks/context.py [--tokens 65536] [--ranks 2] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

VOCAB = 258


def measure(tokens: int, ranks: int, dtype: str) -> list[dict[str, Any]]:
    """One step on each of `ranks` processes that share the sequence; what each of them measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, "--tokens", str(tokens), "--ranks", str(ranks), "--dtype", dtype, "--results", folder]
        root = str(Path(__file__).parents[1])
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root})
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def one_rank(tokens: int, ranks: int, dtype: str) -> dict[str, Any]:
    import torch

    from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
    from lockstep.model import initialize, preset, resolve_dtype
    from lockstep.parallel import close_world, open_world, parallel_model
    from lockstep.train import Trainer, pack
    from lockstep.train.context import shard_row
    from lockstep.train.objective import NextTokenLoss

    parallel = ParallelConfig(context=ranks)
    world = open_world(parallel, "cpu")
    shape = replace(preset("llama3:micro", VOCAB), num_layers=3, num_heads=2, num_kv_heads=1)
    fill = partial(initialize, seed=0)
    model = parallel_model(shape, resolve_dtype(dtype), world, parallel, CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(keep_freed_memory=False), 10, world)
    sequence = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()

    def step(length: int) -> float:
        return trainer.step([shard_row(pack([sequence[:length]]), world)], NextTokenLoss(length - 1))["loss"]

    step(256)  # what every process holds whatever the sequence: libraries, weights, moments
    seconds, before, began = attention_seconds(), resident_mib(), time.perf_counter()
    loss = step(tokens)
    result = {
        "loss": loss,
        "seconds": time.perf_counter() - began,
        "before_mib": before,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "attention_seconds": sum(seconds),
        "rank": world.rank,
    }
    close_world(world)
    return result


def attention_seconds() -> list[float]:
    """The processor time of every call of attention, forward and backward, from now on."""
    from lockstep.ops import packed_attention

    calls: list[float] = []

    def time_calls(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            result = function(*args, **named)
            calls.append(time.thread_time() - began)
            return result

        setattr(owner, name, timed)

    time_calls(packed_attention.PackedAttention, "forward")
    time_calls(packed_attention, "attend_backward")
    time_calls(packed_attention.PieceAttention, "forward")
    return calls


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--results")
    options = parser.parse_args()
    if options.results:
        result = one_rank(options.tokens, options.ranks, options.dtype)
        (Path(options.results) / f"{result['rank']}.json").write_text(json.dumps(result))
        return
    (alone,), shared = (measure(options.tokens, ranks, options.dtype) for ranks in (1, options.ranks))
    print(f"{options.tokens} tokens in one sequence, {options.dtype}")
    for name, results in (("one process", [alone]), (f"{options.ranks} ranks", shared)):
        for r in results:
            print(
                f"{name:12} peak {r['peak_mib']:6.0f} MiB, of it for the step {r['peak_mib'] - r['before_mib']:6.0f}; "
                f"attention {r['attention_seconds']:6.1f} s, step {r['seconds']:6.1f} s, loss {r['loss']:.6f}"
            )
    own = [r["peak_mib"] - r["before_mib"] for r in shared]
    work = [r["attention_seconds"] for r in shared]
    print(f"a rank's memory for the step: {max(own) / (alone['peak_mib'] - alone['before_mib']):.3f} of one process's")
    print(f"a rank's whole peak: {max(r['peak_mib'] for r in shared) / alone['peak_mib']:.3f}")
    print(f"attention, longest rank to shortest: {max(work) / min(work):.3f}")


if __name__ == "__main__":
    main()
