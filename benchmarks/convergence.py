"""The same run under every kind of parallelism: losses beside those of one process, as a table and a picture.

Every run is `lockstep pretrain` on the standard library's source, on the CPU, with the same seed: what differs is the
order in which sums are added. Writes docs/convergence.png and prints the table of docs/convergence.md.
Run: python benchmarks/convergence.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep.observe import read_metrics

STEPS = 60
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "FSDP 2": (2, []),
    "DDP 2": (2, ["--parallel.data-replicate", "2"]),
    "HSDP 2 x 2": (4, ["--parallel.data-replicate", "2"]),
    "tensor 2": (2, ["--parallel.tensor", "2"]),
    "context 2": (2, ["--parallel.context", "2"]),
    "pipeline 2": (2, ["--parallel.pipeline", "2"]),
    "tensor 2 x FSDP 2": (4, ["--parallel.tensor", "2"]),
    "pipeline 2 x FSDP 2": (4, ["--parallel.pipeline", "2"]),
}


def losses(name: str, folder: Path, steps: int) -> list[float]:
    """Of every step of a run under the layout."""
    ranks, options = LAYOUTS[name]
    output = folder / name.replace(" ", "-")
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command += [
        "lockstep", "pretrain", "--model", "llama3:tiny", "--steps", str(steps), "--tokens-per-step", "2048",
        "--sequence-length", "256", "--train.tokens-per-microbatch", "512", "--dtype", "float32", "--device", "cpu",
        "--output", str(output), *options,
    ]  # fmt: skip
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{name} failed:\n{result.stderr[-3000:]}")
    return [line["loss"] for line in read_metrics(output / "metrics.jsonl")]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Losses above, and below how far each layout is from one process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    alone = curves["one process"]
    steps = range(1, len(alone) + 1)
    for index, (name, values) in enumerate(curves.items()):
        style = {"color": f"C{index}", "linewidth": 1.2}
        above.plot(steps, values, label=name, **style)
        if values is not alone:
            below.plot(steps, [max(abs(v / a - 1), 1e-9) for v, a in zip(values, alone)], **style)
    above.set_ylabel("loss, nats a byte")
    above.legend(fontsize=7, ncols=3)
    below.set_ylabel("relative difference\nfrom one process")
    below.set_yscale("log")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs" / "convergence.png")
    options = parser.parse_args()
    curves: dict[str, list[float]] = {}
    print("| layout | ranks | loss at the end | largest relative difference |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for name, (ranks, _) in LAYOUTS.items():
            curves[name] = losses(name, Path(folder), options.steps)
            largest = max(abs(v / a - 1) for v, a in zip(curves[name], curves["one process"]))
            print(f"| {name} | {ranks} | {curves[name][-1]:.6f} | {largest:.1e} |", flush=True)
    draw(curves, options.output)


if __name__ == "__main__":
    main()
