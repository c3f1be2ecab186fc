"""`lockstep compare`: where runs first differ, by which settings, and which is best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import UserError
from lockstep.observe.compare import compare_steps, comparison_text, comparisons_text, steps_of
from lockstep.observe.compare_settings import settings_text
from lockstep.observe.ranking import default_metric, rank, ranking_text


def compare_runs(runs: Sequence[str], tolerance: float = 0.0, by: str = "", plot: str = "") -> tuple[str, bool]:
    """The command's output, and whether no run differs from the first beyond `tolerance`; also draws the `plot`.

    by: the metric to rank the runs by; empty: a default that they have. Raises UserError for fewer than two runs, for a
    run without metrics or without a step of the first, for a metric that no run has, and for a plot that cannot be
    written.
    """
    if not 0 <= tolerance < math.inf:
        raise UserError(f"tolerance is {tolerance}; give a relative difference of 0 or more")
    if plot:
        from lockstep.observe.compare_plot import comparison_plot, refuse_plot

        refuse_plot(Path(plot))
    labels = [str(Path(run)) for run in runs]
    if len(labels) < 2:
        raise UserError("there is nothing to compare; give the folders of two or more runs")
    metrics = {label: steps_of(Path(label)) for label in labels}
    first, *others = labels
    comparisons = {other: compare_steps(first, metrics[first], other, metrics[other]) for other in others}
    if len(labels) == 2:
        sections = [comparison_text(comparisons[others[0]], tolerance)]
    else:
        sections = [comparisons_text(first, comparisons, tolerance)]
    sections.append(settings_text(list(metrics)))
    lines = {label: list(steps.values()) for label, steps in metrics.items()}
    if by or (by := default_metric(list(lines.values()))):
        sections.append(ranking_text(rank(lines, by), by))
    if plot:
        comparison_plot(metrics, comparisons, Path(plot))
        sections.append(f"plot: {plot}")
    return "\n\n".join(filter(None, sections)), all(each.equal(tolerance) for each in comparisons.values())
