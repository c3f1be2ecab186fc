"""Memory and time of a training step in each recomputation mode, at 110M parameters and 4 x 512 tokens in bfloat16.

Each mode runs in a process of its own, on one thread; times are the processor's, so that neighbours do not count.
"Activations" is what the process grew by, at its peak, over its peak after a step of 8 tokens, which has made
gradients and optimizer state.
Run: python benchmarks/recompute.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from functools import partial

MODES: dict[str, dict[str, object]] = {
    "none": {},
    "every, k = 2": {"mode": "every"},
    "selective, keeps attention and linear": {"mode": "selective", "keep": ("attention", "linear")},
    "selective, keeps attention": {"mode": "selective"},
    "budget, 0.3 GiB": {"mode": "budget", "budget_gib": 0.3},
    "full": {"mode": "full"},
}
ROWS, LENGTH, STEPS = 4, 512, 2


def measure(mode: dict[str, object]) -> None:
    import torch

    from lockstep.config import CompileConfig, ParallelConfig, RecomputeConfig, TrainConfig
    from lockstep.model import initialize, preset
    from lockstep.parallel import open_world, parallel_model
    from lockstep.parallel.recompute import apply_recompute
    from lockstep.train import Trainer, pack
    from lockstep.train.objective import NextTokenLoss

    torch.set_num_threads(1)
    world = open_world(ParallelConfig(), "cpu")
    fill = partial(initialize, seed=0)
    model = parallel_model(preset("qwen3:small"), torch.bfloat16, world, ParallelConfig(), CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(), STEPS + 2, world)
    trainer.step([pack([list(range(8))])], NextTokenLoss(7))
    apply_recompute(model, RecomputeConfig(**mode))  # type: ignore[arg-type]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = pack([torch.randint(32000, (LENGTH,)).tolist() for _ in range(ROWS)])
    seconds = []
    for _ in range(STEPS):
        began = time.process_time()
        trainer.step([row], NextTokenLoss(ROWS * (LENGTH - 1)))
        seconds.append(time.process_time() - began)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"gib": grown / 2**20, "seconds": min(seconds)}))


def main() -> None:
    print("| `recompute.mode` | activations, GiB | step, s |\n| --- | --- | --- |")
    for name, mode in MODES.items():
        done = subprocess.run([sys.executable, __file__, json.dumps(mode)], capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        print(f"| {name} | {result['gib']:.2f} | {result['seconds']:.2f} |", flush=True)


if __name__ == "__main__":
    measure(json.loads(sys.argv[1])) if len(sys.argv) > 1 else main()
