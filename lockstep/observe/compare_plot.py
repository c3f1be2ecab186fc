"""The curves of runs that are compared, and how far each is from the first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import UserError
from lockstep.observe.compare import Comparison, Steps, shared_names

FORMATS = (".png", ".svg", ".pdf")
COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#ca8a04", "#db2777", "#475569")


def comparison_plot(runs: Mapping[str, Steps], comparisons: Mapping[str, Comparison], path: Path) -> None:
    """Plots the curves of all runs, and below them the relative differences from the first one.

    runs: their metrics by label. comparisons: of the first run with the others, by their labels.
    """
    from matplotlib.figure import Figure

    colors = {run: COLORS[index % len(COLORS)] for index, run in enumerate(runs)}
    names = shared_names(comparisons)
    figure = Figure(figsize=(4.6 * max(1, len(names)), 4.8), layout="constrained")
    for column, name in enumerate(names):
        above = figure.add_subplot(2, len(names), column + 1)
        for index, (run, steps) in enumerate(runs.items()):
            points = curve(steps, name)
            above.plot(list(points), list(points.values()), "--" if index else "-", color=colors[run], label=run)
        above.set_title(name, fontsize=10, loc="left", fontweight="bold")
        for text in above.legend(fontsize=7).get_texts():
            text.set_parse_math(False)  # a folder's name may contain a $
        below = figure.add_subplot(2, len(names), len(names) + column + 1)
        differences = {run: each.metrics[name] for run, each in comparisons.items() if name in each.metrics}
        for run, of_run in differences.items():
            relative = [d.relative if d.relative else math.nan for d in of_run]
            below.plot([d.step for d in of_run], relative, ".", color=colors[run])
        relative = [d.relative for of_run in differences.values() for d in of_run]
        if any(0 < each < math.inf for each in relative):
            below.set_yscale("log")
        elif not any(relative):
            below.text(0.5, 0.5, "the same bits", ha="center", transform=below.transAxes)
        below.set_ylabel("relative difference", fontsize=8)
        below.set_xlabel("step", fontsize=8)
        for axis in (above, below):
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def refuse_plot(path: Path) -> None:
    """Raises UserError for a file that `comparison_plot` cannot write."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: a plot is {', '.join(FORMATS)}; give a name that ends so")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it, or give another --plot")


def curve(steps: Steps, name: str) -> dict[int, float]:
    """A metric by step, without the steps that lack it, such as those between validations; NaN (a gap) where null."""
    values = {step: metrics[name] for step, metrics in steps.items() if name in metrics}
    return {step: math.nan if value is None else value for step, value in values.items()}
