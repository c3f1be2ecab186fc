"""Where two runs diverge: the first step at which a loss, a gradient norm or a reward is not bitwise identical."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError
from lockstep.observe.metrics import read_metrics
from lockstep.observe.run_folder import METRICS

NAMES = (
    "loss", "grad_norm", "validation/loss", "reward/mean", "rollout/tokens", "policy/entropy", "validation/reward",
)  # fmt: skip
"""Those that the runs have."""
ROWS = 8
"""Rows of the table, starting at the step before the first difference."""


@dataclass(frozen=True)
class Difference:
    """A metric of two runs at one step; None if it was not finite or missing."""

    step: int
    first: float | None
    second: float | None

    @property
    def relative(self) -> float:
        """Relative to the larger of the two; infinite if only one is a number."""
        if self.first == self.second:
            return 0.0
        if self.first is None or self.second is None:
            return math.inf
        return abs(self.first - self.second) / max(abs(self.first), abs(self.second))


@dataclass(frozen=True)
class Comparison:
    """Two runs, metric by metric, over the steps they have in common."""

    steps: list[int]
    only_first: int
    """Steps that only the first run has."""
    only_second: int
    metrics: dict[str, list[Difference]]

    def first_beyond(self, name: str, tolerance: float = 0.0) -> Difference | None:
        """The first step whose relative difference is above `tolerance`; 0 compares bits."""
        return next((d for d in self.metrics[name] if d.relative > tolerance), None)

    def equal(self, tolerance: float = 0.0) -> bool:
        """Whether all metrics of all steps agree, and both runs have the same steps."""
        within = all(self.first_beyond(name, tolerance) is None for name in self.metrics)
        return within and not self.only_first and not self.only_second


def compare_runs(first: str | Path, second: str | Path) -> Comparison:
    """Compares the metrics of two runs' folders. Raises UserError if one has none, or they share no step.

    JSON keeps every bit of a number, so equal numbers had equal bits.
    """
    runs = [_by_step(Path(folder)) for folder in (first, second)]
    steps = sorted(runs[0].keys() & runs[1].keys())
    if not steps:
        raise UserError(f"{first} and {second} have no step in common; there is nothing to compare")
    metrics = {
        name: [Difference(s, runs[0][s].get(name), runs[1][s].get(name)) for s in steps]
        for name in NAMES
        if any(name in run[s] for run in runs for s in steps)
    }
    return Comparison(steps, len(runs[0]) - len(steps), len(runs[1]) - len(steps), metrics)


def comparison_text(comparison: Comparison, tolerance: float = 0.0) -> str:
    """What `lockstep compare` prints."""
    steps = comparison.steps
    lines = [f"steps compared: {len(steps)}, from {steps[0]} to {steps[-1]}"]
    for count, run in ((comparison.only_first, "first"), (comparison.only_second, "second")):
        if count:
            lines.append(f"steps that only the {run} run has: {count}")
    beyond = f"first beyond {tolerance:g}" if tolerance else ""
    lines += ["", f"{'':18} {'first different bit':>20} {beyond:>22} {'largest relative':>26}"]
    for name, differences in comparison.metrics.items():
        largest = max(differences, key=lambda d: d.relative)
        at = f"{largest.relative:.2e} at step {largest.step}" if largest.relative else "0"
        apart = _step(comparison.first_beyond(name, tolerance)) if tolerance else ""
        lines.append(f"{name:18} {_step(comparison.first_beyond(name)):>20} {apart:>22} {at:>26}")
    name = next((n for n in comparison.metrics if comparison.first_beyond(n)), "")
    if name:
        lines += ["", f"{'step':>8} {f'first {name}':>24} {f'second {name}':>24} {'relative':>10}"]
        differences = comparison.metrics[name]
        start = next(i for i, d in enumerate(differences) if d.relative)
        for difference in differences[max(0, start - 1) :][:ROWS]:
            values = f"{difference.first!r:>24} {difference.second!r:>24}"
            lines.append(f"{difference.step:>8} {values} {difference.relative:>10.1e}")
    return "\n".join(lines)


def comparison_plot(comparison: Comparison, path: Path, labels: tuple[str, str]) -> None:
    """Plots both runs' curves, and the relative difference below each."""
    from matplotlib.figure import Figure

    columns = len(comparison.metrics)
    figure = Figure(figsize=(4.6 * columns, 4.8), layout="constrained")
    for column, (name, differences) in enumerate(comparison.metrics.items()):
        steps = [d.step for d in differences]
        above = figure.add_subplot(2, columns, column + 1)
        for label, color, style, values in (
            (labels[0], "#2563eb", "-", [d.first for d in differences]),
            (labels[1], "#ea580c", "--", [d.second for d in differences]),
        ):
            above.plot(steps, [math.nan if v is None else v for v in values], style, color=color, label=label)
        above.set_title(name, fontsize=10, loc="left", fontweight="bold")
        above.legend(fontsize=7)
        below = figure.add_subplot(2, columns, columns + column + 1)
        below.plot(steps, [d.relative if d.relative else math.nan for d in differences], ".", color="#b91c1c")
        if any(0 < d.relative < math.inf for d in differences):
            below.set_yscale("log")
        else:
            below.text(0.5, 0.5, "the same bits", ha="center", transform=below.transAxes)
        below.set_ylabel("relative difference", fontsize=8)
        below.set_xlabel("step", fontsize=8)
        for axis in (above, below):
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _by_step(folder: Path) -> dict[int, dict[str, float | None]]:
    metrics = read_metrics(folder / METRICS)
    if not metrics:
        raise UserError(f"{folder}: has no {METRICS}; give the folder of a run that has finished a step")
    return {int(m["step"]): m for m in metrics}


def _step(difference: Difference | None) -> str:
    return "none" if difference is None else f"step {difference.step}"
