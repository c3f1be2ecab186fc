"""What worker processes add to a cheap reward: the digit sum's, for as many completions as a step of the demo has.

    python benchmarks/rewards.py [--completions 256] [--run RUN]

Prints milliseconds of a step's rewards in the trainer's own process and in workers, the best of 30, and of a program in
the sandbox; with a run's folder also their share of its median step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.config import RewardConfig
from lockstep.rl.environments.digit_sum import DigitSum
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.grading import grade_here
from lockstep.rl.grading.pool import open_workers
from lockstep.rl.grading.sandbox import run_code


def best(call: Callable[[], object], times: int = 30) -> float:
    """Seconds of the fastest of some calls."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--run", type=Path, help="a run's folder, to compare with its steps")
    options = parser.parse_args()
    examples = list(DigitSum().examples("train"))
    # Groups of eight, as in the demo.
    jobs = [(examples[i // 8 % len(examples)], f"{i % 19}\n") for i in range(options.completions)]
    found = {"trainer's own process": best(lambda: grade_here(DigitSum(), jobs))}
    for workers in (1, 2):
        source, limits = EnvironmentSource("digit_sum"), RewardConfig(workers=workers)
        with tempfile.TemporaryDirectory() as folder, open_workers(source, limits, Path(folder)) as grader:
            assert grader(jobs) == grade_here(DigitSum(), jobs)
            found[f"{workers} worker{'s' * (workers > 1)}"] = best(lambda: grader(jobs))
    step = None
    if options.run:
        lines = (options.run / "metrics.jsonl").read_text().splitlines()
        step = statistics.median(m["time/step"] for m in map(json.loads, lines) if "time/step" in m)
    for name, seconds in found.items():
        print(f"{options.completions} rewards, {name}: {1000 * seconds:.2f} ms", end="")
        print(f", {seconds / step:.2%} of a step of {step:.3f} s" if step else "")
    print(f"a program that prints a line, in the sandbox: {1000 * best(lambda: run_code('print(1)'), 10):.0f} ms")


if __name__ == "__main__":
    main()
