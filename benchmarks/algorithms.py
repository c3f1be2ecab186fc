"""Curves of every algorithm on sums of digits, and beside each a control: the same run with random rewards.

Each run begins with the demo's small model, which gives half of the sums a wrong answer, and is judged by the accuracy
on sums that no stage has seen. In the control a coin is the reward, so that accuracy must not rise; distillation's
control has the start itself as teacher, and else the result of GRPO. Draws a picture and prints a table. Runs, starts
and curves are kept in --work: what is there is not run again.
Run: python benchmarks/algorithms.py --output algorithms.png     (3 seeds take an hour; --seeds 1 --steps 30 minutes)
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, ClassVar, get_args

from lockstep.config.algorithm import AlgorithmName
from lockstep.observe import read_metrics
from lockstep.progress import Progress
from lockstep.recipes import digit_sum
from lockstep.recipes.demo import ERROR_RATE, LINES, demo_pretraining
from lockstep.rl import Example
from lockstep.rl.environments.digit_sum import DigitSum, pretraining_text
from lockstep.rl.reinforce import reinforce
from lockstep.train.pretrain import pretrain

STEPS, SEEDS, EVERY, COLUMNS = 80, 3, 10, 6
PRETRAINING = 0.5
"""Its length in the progress bar, of a reinforcement run's."""
Curve = list[tuple[int, float]]


class Coin(DigitSum):
    """Sums of digits whose reward is a coin's; whether the answer is right is told, but weighs nothing."""

    reward_weights: ClassVar[dict[str, float]] = {"correct": 0.0}

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        return super().reward(example, completion) | {"coin": float(self.draw.random() < 0.5)}


def start(folder: Path, seed: int, progress: Progress | None = None, steps: int = 0) -> Path:
    """The folder of a model that is to be reinforced."""
    config = demo_pretraining(str(folder / f"start-{seed}"), seed)
    config.steps = steps or config.steps
    model = Path(config.output) / "checkpoints" / f"step_{config.steps:08}"
    if not model.exists():
        config.overwrite = True
        pretrain(config, list(pretraining_text(LINES, ERROR_RATE, seed)), progress)
    return model


def accuracies(
    name: AlgorithmName, model: Path, output: Path, seed: int, control: bool, progress: Progress | None, **changes: Any
) -> Curve:
    """(step, accuracy on held-out sums) of a run, before its first step and on the way."""
    config = digit_sum()
    config.algorithm, config.model, config.output, config.seed = name, str(model), str(output), seed
    config.validation_every = EVERY
    for setting, value in changes.items():
        setattr(config, setting, value)
    if not (output / "summary.json").exists():
        config.overwrite = True
        reinforce(config, Coin(seed) if control else DigitSum(), progress)
    lines = [line for line in read_metrics(output / "metrics.jsonl") if "validation/accuracy" in line]
    return [(line["step"], line["validation/accuracy"]) for line in lines]


def draw(curves: dict[tuple[str, bool], list[Curve]], path: Path) -> None:
    """One panel per algorithm: every seed's curve, and the controls' in grey."""
    from matplotlib.figure import Figure

    names = sorted({name for name, _ in curves}, key=get_args(AlgorithmName).index)
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(11, 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, name in zip(panels, names):
        for control, style in ((True, {"color": "0.65"}), (False, {"color": "C0"})):
            for curve in curves[name, control]:
                panel.plot(*zip(*curve), linewidth=1.2, **style)
        panel.set_title(name, fontsize=9)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("accuracy on held-out sums", fontsize=9)
    figure.savefig(path, dpi=110)


def table(curves: dict[tuple[str, bool], list[Curve]]) -> str:
    """Accuracy before and after, with rewards and with a coin's: mean over the seeds, and the range after."""
    lines = ["| algorithm | before | after | with random rewards |", "| --- | --- | --- | --- |"]
    for name in dict.fromkeys(name for name, _ in curves):
        cells = []
        for control in (False, True):
            after = [curve[-1][1] for curve in curves[name, control]]
            cells.append(f"{statistics.mean(after):.3f} ({min(after):.3f} to {max(after):.3f})")
        before = statistics.mean(curve[0][1] for curve in curves[name, False])
        lines.append(f"| `{name}` | {before:.3f} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=get_args(AlgorithmName), default=get_args(AlgorithmName))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--output", type=Path, default=Path("algorithms.png"))
    parser.add_argument("--work", type=Path, help="folder of the runs (default: one that is deleted)")
    options = parser.parse_args()
    # A teacher is made by GRPO, which goes first.
    names = sorted(options.algorithms, key=lambda name: name == "distillation")
    if "distillation" in names and "grpo" not in names:
        names.insert(0, "grpo")
    curves: dict[tuple[str, bool], list[Curve]] = {(n, control): [] for n in names for control in (False, True)}
    total = options.seeds * (PRETRAINING + len(curves))
    with tempfile.TemporaryDirectory() as scratch, Progress("algorithms", total) as bar:
        for seed in range(options.seeds):
            folder = options.work or Path(scratch)
            careless = demo_pretraining("", seed)
            model = start(folder, seed, bar.stage(f"start, seed {seed}", careless.steps, PRETRAINING))
            for name, control in curves:
                output = folder / f"{name}-{seed}-{'control' if control else 'run'}"
                changes: dict[str, Any] = {"steps": options.steps}
                if name == "distillation":
                    changes["teacher"] = str(model if control else folder / f"grpo-{seed}-run")
                title = f"{name}{', random rewards' if control else ''}, seed {seed}"
                stage = bar.stage(title, options.steps, 1)
                curves[name, control].append(accuracies(name, model, output, seed, control, stage, **changes))
            draw({key: found for key, found in curves.items() if found}, options.output)
    print(table(curves))


if __name__ == "__main__":
    main()
