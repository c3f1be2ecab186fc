"""Where runs diverge: the first step at which a loss, a gradient norm or a reward is not bitwise identical."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.observe.metrics import read_metrics
from lockstep.observe.run_folder import METRICS
from lockstep.observe.text_table import text_table

NAMES = (
    "loss", "grad_norm", "validation/loss", "reward/mean", "rollout/tokens", "policy/entropy", "validation/reward",
)  # fmt: skip
"""Metrics that are compared, if the runs have them."""
ROWS = 8
"""Rows of the table, starting at the step before the first difference."""

Steps = Mapping[int, Mapping[str, Any]]
"""A run's metrics by step."""


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

    JSON represents a number exactly, so equal numbers have equal bits.
    """
    return compare_steps(str(first), steps_of(Path(first)), str(second), steps_of(Path(second)))


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    """A run's metrics by step. Raises UserError if it has none."""
    metrics = read_metrics(folder / METRICS)
    if not metrics:
        raise UserError(f"{folder}: has no {METRICS}; give the folder of a run that has finished a step")
    return {int(m["step"]): m for m in metrics}


def compare_steps(first: str, of_first: Steps, second: str, of_second: Steps) -> Comparison:
    """Compares the metrics of the runs named `first` and `second`. Raises UserError if they share no step."""
    steps = sorted(of_first.keys() & of_second.keys())
    if not steps:
        raise UserError(f"{first} and {second} have no step in common; there is nothing to compare")
    metrics = {
        name: [Difference(s, of_first[s].get(name), of_second[s].get(name)) for s in steps]
        for name in NAMES
        if any(name in run[s] for run in (of_first, of_second) for s in steps)
    }
    return Comparison(steps, len(of_first) - len(steps), len(of_second) - len(steps), metrics)


def comparison_text(comparison: Comparison, tolerance: float = 0.0) -> str:
    """Where two runs differ, with the values around the first difference."""
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


def comparisons_text(first: str, comparisons: Mapping[str, Comparison], tolerance: float = 0.0) -> str:
    """Where each of several runs first differs from `first`: a row per run, a column per metric."""
    names = shared_names(comparisons)
    beyond = f"difference beyond {tolerance:g}" if tolerance else "different bit"
    rows = []
    for run, comparison in comparisons.items():
        differing = [
            _step(comparison.first_beyond(name, tolerance)) if name in comparison.metrics else "-" for name in names
        ]
        steps = len(comparison.steps), comparison.only_first, comparison.only_second
        rows.append([run, *differing, *map(str, steps)])
    head = [f"first {beyond} from {first}", *names, "steps compared", "only in the first", "only here"]
    return text_table(head, rows)


def shared_names(comparisons: Mapping[str, Comparison]) -> list[str]:
    """The metrics that any of the comparisons has, in the order of `NAMES`."""
    return [name for name in NAMES if any(name in comparison.metrics for comparison in comparisons.values())]


def _step(difference: Difference | None) -> str:
    return "none" if difference is None else f"step {difference.step}"
