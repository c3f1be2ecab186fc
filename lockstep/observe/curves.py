"""A run's curves as figures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.observe.metrics import read_metrics
from lockstep.observe.run_folder import METRICS

# Title, unit, and the metrics drawn in it; panels without data, or with nothing but zeros, are left out.
PANELS: list[tuple[str, str, tuple[str, ...]]] = [
    ("Reward", "mean a completion", ("reward/mean",)),
    ("Held-out accuracy", "share correct", ("validation/accuracy",)),
    ("Rewards by name", "mean a completion", ("reward/correct/mean", "reward/format/mean")),
    ("Completion length", "tokens", ("rollout/tokens_mean",)),
    ("Loss", "nats a target", ("loss", "validation/loss")),
    ("Policy entropy", "nats a token", ("policy/entropy",)),
    ("Gradient norm", "before clipping", ("grad_norm",)),
    ("Learning rate", "", ("learning_rate",)),
    ("Throughput", "tokens a second", ("tokens_per_second", "rollout/tokens_per_second")),
    ("Share of the device's peak (MFU)", "", ("mfu",)),
    ("Memory", "GiB, the most so far", ("memory_gib",)),
    ("Steps skipped", "not finite, so far", ("skipped_steps",)),
]
SMOOTH = ("learning_rate", "memory_gib", "skipped_steps")
COLORS = ("#2563eb", "#ea580c")


def curves_png(run: Path, path: Path, columns: int = 3) -> None:
    """The run's curves as one picture."""
    figure = _draw(run, columns)
    figure.savefig(path, format="png", dpi=110)


def curves_svg(run: Path, columns: int = 3) -> str:
    """The run's curves as inline SVG; empty where nothing is there to draw."""
    figure = _draw(run, columns)
    if not figure.axes:
        return ""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _draw(run: Path, columns: int) -> Any:
    from matplotlib.figure import Figure

    metrics = read_metrics(run / METRICS)
    panels = [p for p in PANELS if any(any(_series(metrics, name)[1]) for name in p[2])]
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(3.9 * columns, 2.6 * rows), layout="constrained")
    for index, (title, unit, names) in enumerate(panels):
        axis = figure.add_subplot(rows, columns, index + 1)
        for name, color in zip(names, COLORS):
            steps, values = _series(metrics, name)
            if not steps:
                continue
            few = len(values) < 20
            # What is smooth by nature is drawn as it is.
            smooth = few or name in SMOOTH
            label = _label(name) if smooth else None
            marker, alpha = "o" if few else "", 1.0 if smooth else 0.25
            axis.plot(steps, values, color=color, alpha=alpha, linewidth=1.2, marker=marker, label=label)
            if not smooth:
                axis.plot(steps, _smoothed(values), color=color, linewidth=1.8, label=_label(name))
        if len(names) > 1 and axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
        axis.set_title(title, fontsize=10, loc="left", fontweight="bold")
        axis.set_ylabel(unit, fontsize=8)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _series(metrics: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    points = [(m["step"], m[name]) for m in metrics if m.get(name) is not None]
    return [p[0] for p in points], [p[1] for p in points]


def _smoothed(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential moving average, started at the first value."""
    smooth, level = [], values[0]
    for value in values:
        level = weight * level + (1 - weight) * value
        smooth.append(level)
    return smooth


def _label(name: str) -> str:
    """`reward/format/mean` -> format; `rollout/tokens_per_second` -> rollout; `tokens_per_second` -> training."""
    parts = name.split("/")
    if len(parts) == 1:
        return "training"
    return parts[1] if len(parts) == 3 else parts[0]
