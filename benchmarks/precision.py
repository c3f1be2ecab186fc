"""Pretraining in each precision beside the model's dtype: losses of the same run, as a table and a picture.

Every run is `lockstep pretrain` of the 5M-parameter model on the standard library's source, in bfloat16 on the CPU; the
first and the last of its six layers, and the head, are not quantized, as by default. Writes docs/precision.png and
prints the table of docs/precision.md. A run takes 3 to 6 minutes; those in --runs that are complete are read.
Run: python benchmarks/precision.py [--seeds 3] [--precisions int8 mxfp8] [--runs FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep.observe import read_metrics
from lockstep.precision import MULTIPLES, NONE

STEPS, AVERAGED = 600, 50
"""Steps of a run, and its last ones whose losses are averaged."""


def losses(form: str, seed: int, steps: int, folder: Path) -> list[float]:
    output = folder / f"{form}-{seed}"
    done = [line["loss"] for line in read_metrics(output / "metrics.jsonl")] if output.is_dir() else []
    if len(done) == steps:
        return done
    command = [
        sys.executable, "-m", "lockstep", "pretrain", "--model", "qwen3:tiny", "--tokenizer", "bpe:2048", "--dtype",
        "bfloat16", "--device", "cpu", "--steps", str(steps), "--tokens-per-step", "2048", "--sequence-length", "256",
        "--train.tokens-per-microbatch", "2048", "--train.learning-rate", "5e-4", "--seed", str(seed),
        "--precision.linear", form, "--output", str(output),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{form} failed:\n{result.stderr[-3000:]}")
    return [line["loss"] for line in read_metrics(output / "metrics.jsonl")]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The model's dtype above, and below how far each precision is from it, averaged over some steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for index, (form, values) in enumerate(curves.items()):
        ends = range(AVERAGED, len(values) + 1, AVERAGED // 2)
        means = [statistics.mean(values[end - AVERAGED : end]) for end in ends]
        if form == NONE:
            reference = means
        above.plot(ends, means, label="bfloat16" if form == NONE else form, color=f"C{index}", linewidth=1.2)
        difference = [100 * (mean / other - 1) for mean, other in zip(means, reference)]
        below.plot(ends, difference, color=f"C{index}", linewidth=1.2)
    above.set_ylabel("loss, nats a token")
    above.legend(fontsize=7, ncols=3)
    below.set_ylabel("difference from bfloat16, %")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--precisions", nargs="*", choices=[*MULTIPLES], default=[*MULTIPLES])
    parser.add_argument("--runs", type=Path, help="where runs are kept; default: a temporary folder")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs" / "precision.png")
    options = parser.parse_args()
    curves: dict[str, list[float]] = {}
    finals: dict[str, list[float]] = {}
    print(f"| precision | loss of the last {AVERAGED} of {options.steps} steps, by seed | largest difference |")
    print("| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for form in dict.fromkeys([NONE, *options.precisions]):
            where = options.runs or Path(folder)
            runs = [losses(form, seed, options.steps, where) for seed in range(options.seeds)]
            curves[form] = [statistics.mean(step) for step in zip(*runs)]
            finals[form] = [statistics.mean(run[-AVERAGED:]) for run in runs]
            worst = max(abs(final / other - 1) for final, other in zip(finals[form], finals[NONE]))
            listed = ", ".join(f"{final:.4f}" for final in finals[form])
            print(f"| {'bfloat16' if form == NONE else f'`{form}`'} | {listed} | {100 * worst:.2f} % |", flush=True)
    draw(curves, options.output)


if __name__ == "__main__":
    main()
