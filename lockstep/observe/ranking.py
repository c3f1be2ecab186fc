"""Runs ordered by the last value of a metric, best first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import UserError, closest
from lockstep.observe.text_table import text_table

DEFAULTS = ("validation/accuracy", "validation/reward", "validation/loss", "reward/mean", "loss")
"""Metrics to rank runs by: the first that all runs have, or else the first that any has."""
NOT_METRICS = ("step", "time")
LOWER = {
    "loss", "kl", "perplexity", "time", "seconds", "memory", "padding", "failed", "truncated", "different", "delta",
    "stderr", "skipped", "dropped", "staleness", "alarm", "spread", "rms",
}  # fmt: skip
"""Words in the names of metrics for which lower is better."""
NEITHER = {"std", "chosen", "rejected"}
"""Words in the names of metrics for which neither is better."""
HIGHER = {"reward", "rewards", "accuracy", "validation", "score", "scores", "margin", "mfu", "tflops", "explained"}
"""Words in the names of metrics for which higher is better, unless they also contain one of `LOWER` or `NEITHER`."""


@dataclass(frozen=True)
class Ranked:
    """A run's values of a metric: the last and the best, each with its step; None if it has none."""

    run: str
    last: tuple[float, int] | None = None
    best: tuple[float, int] | None = None


def lower_is_better(name: str) -> bool | None:
    """Whether lower values of a metric are better, judged by its name; None if unknown."""
    if "pass@" in name or "_per_second" in name:
        return False
    words = set(re.split(r"[/_]", name))
    if words & NEITHER:
        return None
    return True if words & LOWER else False if words & HIGHER else None


def default_metric(runs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The metric to rank these runs by; empty if they have none of `DEFAULTS`."""
    have = [_names(lines) for lines in runs]
    of_all, of_some = set.intersection(*have), set.union(*have)
    return next((name for names in (of_all, of_some) for name in DEFAULTS if name in names), "")


def rank(runs: Mapping[str, Sequence[Mapping[str, Any]]], metric: str) -> list[Ranked]:
    """The runs, best first; those without the metric are last. `runs`: the lines of metrics.jsonl by the run's name.

    If it is unknown which direction is better, the highest is first and there is no best. Raises UserError for a metric
    that no run has.
    """
    names = set.union(*map(_names, runs.values()))
    if metric not in names:
        raise UserError(f'no run has the metric "{metric}".{closest(metric, sorted(names))}')
    lower = lower_is_better(metric)
    ranked = [_ranked(run, lines, metric, lower) for run, lines in runs.items()]
    # Stable: runs with equal values keep the order of `runs`.
    having = [each for each in ranked if each.last]
    having.sort(key=lambda each: each.last[0] if each.last else 0.0, reverse=not lower)
    return having + [each for each in ranked if not each.last]


def ranking_text(ranked: Sequence[Ranked], metric: str) -> str:
    """A table of the runs with their last and best values."""
    lower = lower_is_better(metric)
    order = "lower is better" if lower else "higher is better" if lower is False else "highest first; no best known"
    rows = [[each.run, *_cells(each.last), *_cells(each.best)] for each in ranked]
    return text_table([f"by {metric} ({order})", "last", "at step", "best", "at step"], rows)


def _ranked(run: str, lines: Sequence[Mapping[str, Any]], metric: str, lower: bool | None) -> Ranked:
    values = [(m[metric], m["step"]) for m in lines if m.get(metric) is not None]
    if not values or lower is None:
        return Ranked(run, values[-1] if values else None)
    return Ranked(run, values[-1], (min if lower else max)(values, key=lambda value: value[0]))


def _names(lines: Sequence[Mapping[str, Any]]) -> set[str]:
    """The metrics that are a number at some step."""
    return {name for m in lines for name, value in m.items() if value is not None and name not in NOT_METRICS}


def _cells(value: tuple[float, int] | None) -> tuple[str, str]:
    return ("-", "-") if value is None else (f"{value[0]:.6g}", str(value[1]))
