"""What sampling ahead brings: steps of a run whose generator works while its trainer does, against taking turns.

Trainer and generator are two processes of one thread each. `speed`: a 5M Qwen3 whose sampling and training take like
times, steps a minute by actors.max_staleness, and how long the trainer waited. `curves`: reward on sums of digits
against the clock, at staleness 0, 1, 2 and 4, into docs/async.png.
Run: OMP_NUM_THREADS=1 python benchmarks/async.py speed [--steps 20] | curves [--seconds 60 --learning-rate 1e-4]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config import ActorsConfig, RLConfig, TrainConfig
from lockstep.observe import read_metrics
from lockstep.recipes import digit_sum
from lockstep.rl.reinforce import reinforce

PLOT = Path(__file__).parents[1] / "docs" / "async.png"
PROMPTS, GROUP, NEW = 4, 8, 96
STALENESS = (0, 1, 2, 4)


def actors(staleness: int) -> ActorsConfig:
    """One generator of one thread."""
    return ActorsConfig(generators=1, threads=1, max_staleness=staleness)


def speed(steps: int, updates_per_batch: int, rounds: int) -> None:
    """Prints a line for each staleness, the rounds interleaved."""
    from grpo import TASK, write_model

    found: dict[int, list[list[dict[str, Any]]]] = {0: [], 1: [], 2: []}
    with tempfile.TemporaryDirectory() as scratch:
        write_model(f"{scratch}/model", "tiny", 2048, "bfloat16", ends=False)
        (Path(scratch) / "task.py").write_text(TASK)
        for number in range(rounds):
            for staleness, runs in found.items():
                output = f"{scratch}/run-{staleness}-{number}"
                config = RLConfig(
                    output=output, model=f"{scratch}/model", environment=f"{scratch}/task.py:Letters",
                    prompts_per_step=PROMPTS, samples_per_prompt=GROUP, max_new_tokens=NEW, steps=steps,
                    updates_per_batch=updates_per_batch, validation_examples=1, train=TrainConfig(learning_rate=1e-5),
                    actors=actors(staleness),
                )  # fmt: skip
                reinforce(config)
                # The first steps fill the buffer, and the last one validates.
                runs.append(read_metrics(Path(output) / "metrics.jsonl")[3:-1])
    turns = 0.0
    print("max_staleness | seconds a step | sampling or waiting | training | steps against taking turns")
    for staleness, rounds_of in found.items():
        lines = [line for run in rounds_of for line in run]
        step, waits, trains = (
            statistics.median(line[name] for line in lines) for name in ("time/step", "time/generate", "time/train")
        )
        turns = turns or step
        print(f"{staleness:13} | {step:14.3f} | {waits:19.3f} | {trains:8.3f} | {turns / step:.2f}x")


def curves(seconds: float, model: str, output: Path, rate: float) -> None:
    """Draws rewards against the clock."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(model) if model else _start(Path(scratch))
        for staleness in STALENESS:
            times, rewards = _curve(folder, f"{scratch}/run-{staleness}", staleness, seconds, rate)
            print(f"max_staleness {staleness}: {len(rewards)} steps, last rewards {statistics.mean(rewards[-5:]):.3f}")
            smooth = [statistics.mean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
            axes.plot(times, smooth, label=f"max_staleness {staleness}: {len(rewards)} steps")
    axes.set(xlabel="seconds", ylabel="mean reward of a step, over 5 steps", title="sums of digits, two processes")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(output, dpi=90)


def _start(scratch: Path) -> Path:
    from algorithms import start

    return start(scratch, seed=0)


def _curve(model: Path, output: str, staleness: int, seconds: float, rate: float) -> tuple[list[float], list[float]]:
    class Enough(Exception):
        pass

    times: list[float] = []
    rewards: list[float] = []
    began = time.perf_counter()

    def note(step: int, metrics: dict[str, Any]) -> None:
        nonlocal began
        if step == 0:
            began = time.perf_counter()
            return
        times.append(time.perf_counter() - began)
        rewards.append(metrics["reward/mean"])
        if times[-1] > seconds:
            raise Enough

    config = digit_sum()
    config.model, config.output, config.steps, config.validation_examples = str(model), output, 100_000, 1
    config.train.learning_rate = rate
    config.actors, config.off_policy = actors(staleness), "truncate"
    with suppress(Enough):
        reinforce(config, on_metrics=note)
    return times, rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("speed", "curves"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--updates-per-batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of curves; the recipe's by default")
    parser.add_argument("--model", default="", help="folder that curves begin with; pretrained when left out")
    parser.add_argument("--output", type=Path, default=PLOT)
    options = parser.parse_args()
    if options.work == "speed":
        speed(options.steps, options.updates_per_batch, options.rounds)
    else:
        curves(options.seconds, options.model, options.output, options.learning_rate)
