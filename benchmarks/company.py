"""Tokens per second alone, and with one and two busy processes beside it: the demo's pretraining and its rollouts.

The fair share is that of a scheduler that divides the cores equally among all busy threads, ours and the neighbours'.
Run: python benchmarks/company.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lockstep  # noqa: F401  before torch, whose libgomp reads what it sets when it is loaded

NEIGHBOURS = (0, 1, 2)
SECONDS = 5.0
TOKENS = 1024
"""Of a micro-batch."""
GOAL = 0.8
BUSY = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    parser.add_argument("--threads", type=int, default=0, help="always so many; 0: what the size of the work is worth")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.seconds, options.threads)
        return
    cores = len(os.sched_getaffinity(0))
    worker = subprocess.Popen(
        [sys.executable, __file__, "--worker", "--seconds", str(options.seconds), "--threads", str(options.threads)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert worker.stdin is not None and worker.stdout is not None
    try:
        print(f"{cores} cores; {json.loads(worker.stdout.readline())['about']}")
        alone: dict[str, float] = {}
        for count in NEIGHBOURS:
            with busy(count):
                worker.stdin.write("go\n")
                worker.stdin.flush()
                measured = json.loads(worker.stdout.readline())
            threads = measured.pop("threads")
            share = min(1.0, cores / (threads + count)) / min(1.0, cores / threads)
            for name, speed in measured.items():
                ratio = speed / alone.setdefault(name, speed)
                met = "" if not count else f"  {ratio / share:.2f} of its fair share (goal {GOAL})"
                print(f"{name:12} {count} beside it  {speed:8,.0f} tokens/s  {ratio:.2f}× alone{met}", flush=True)
    finally:
        worker.stdin.close()
        worker.wait()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that never rest."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def work(seconds: float, always: int = 0) -> None:
    """Measures once for every line on standard input; on `always` threads where given."""
    import torch

    from lockstep import Engine, EngineConfig, SamplingParams, build_model
    from lockstep.config import TrainConfig
    from lockstep.model import preset
    from lockstep.run.threads import fitting_threads
    from lockstep.train import Trainer
    from lockstep.train.packing import PackedRow, pack, target_log_prob_sum

    model = build_model(preset("qwen3:micro"), dtype="float32")
    trainer = Trainer(model, TrainConfig(), total_updates=10**6)
    engine = Engine(model, EngineConfig(cache_tokens=16384))
    draw = torch.Generator().manual_seed(0)
    rows = [pack(torch.randint(256, (TOKENS // 10, 10), generator=draw).tolist()) for _ in range(2)]
    prompts = torch.randint(256, (64, 6), generator=draw).tolist()
    params = SamplingParams(max_tokens=4, n=8, seed=0, ignore_eos=True)

    def loss(model: torch.nn.Module, row: PackedRow) -> torch.Tensor:
        return target_log_prob_sum(model, row, -1.0 / (2 * TOKENS))  # type: ignore[arg-type]

    def pretraining() -> int:
        trainer.step(rows, loss)
        return sum(len(row.tokens) for row in rows)

    def rollouts() -> int:
        engine.weights_changed(0)
        return sum(len(c.token_ids) for group in engine.generate(prompts, params) for c in group)

    kinds: dict[str, Callable[[], int]] = {"pretraining": pretraining, "rollouts": rollouts}
    with fitting_threads(model.config, TOKENS) as threads:
        if always:
            torch.set_num_threads(threads := always)
        for kind in kinds.values():
            kind()
        print(json.dumps({"about": f"qwen3:micro in float32, {threads} thread{'s' * (threads > 1)}"}), flush=True)
        for _ in sys.stdin:
            speeds = {name: tokens_per_second(kind, seconds) for name, kind in kinds.items()}
            print(json.dumps({"threads": threads, **speeds}), flush=True)


def tokens_per_second(kind: Callable[[], int], seconds: float) -> float:
    """Over all rounds of some seconds: a round that was held up counts as much as the others."""
    began, tokens = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        tokens += kind()
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
