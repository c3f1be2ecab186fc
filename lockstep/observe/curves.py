"""Plots of a run's curves, each with a sentence that explains it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.observe.metrics import read_metrics
from lockstep.observe.run_folder import METRICS


@dataclass(frozen=True)
class Panel:
    """One plot: the metrics drawn in it, and how to read them."""

    title: str
    unit: str
    names: tuple[str, ...]
    meaning: str


@dataclass(frozen=True)
class Curve:
    """A rendered panel."""

    title: str
    svg: str
    meaning: str


LOSS = Panel(
    "Loss",
    "nats per target",
    ("loss", "validation/loss"),
    "Mean cross-entropy of the next token: how surprised the model is by the text. It should fall, first fast, then "
    "slowly.",
)
# Panels without data, or with only zeros, are left out.
REINFORCEMENT = [
    Panel(
        "Reward",
        "mean per completion",
        ("reward/mean",),
        "Mean reward of each step's completions. This is what GRPO pushes up; the pale line is every step, the dark "
        "one its moving average.",
    ),
    Panel(
        "Held-out accuracy",
        "share correct",
        ("validation/accuracy",),
        "Correct answers to the validation prompts: if they are not trained on, a rise is learning, not memorization.",
    ),
    Panel(
        "Held-out reward",
        "mean per completion",
        ("validation/reward",),
        "Reward on the validation prompts: if they are not trained on, a rise is learning, not memorization.",
    ),
    Panel("Rewards by name", "mean per completion", (), "The components of the reward."),
    Panel(
        "Completion length",
        "tokens",
        ("rollout/tokens_mean", "rollout/tokens_p10", "rollout/tokens_p90"),
        "Tokens per completion: the mean, and the 10th and 90th percentiles. Growth without more reward can mean that "
        "the model rambles.",
    ),
    Panel(
        "Diversity",
        "share",
        ("diversity/distinct", "diversity/overlap"),
        "Share of distinct completions per prompt, and of token pairs that two of them have in common. If all are the "
        "same, there is nothing to compare.",
    ),
    Panel(
        "Policy entropy",
        "nats per token",
        ("policy/entropy",),
        "How uncertain the model is about the next token. It falls as answers settle; near 0, nothing new is tried.",
    ),
]
TRAINING = [
    Panel(
        "Gradient norm",
        "before clipping",
        ("grad_norm",),
        "The size of each update's gradient. A spike marks a batch that was unusual for the model.",
    ),
    Panel(
        "Learning rate",
        "",
        ("learning_rate",),
        "How far each update moves the weights: it rises in warm-up, then follows the schedule.",
    ),
    Panel(
        "Throughput",
        "tokens per second",
        ("tokens_per_second", "rollout/tokens_per_second"),
        "Tokens trained on, or sampled, per second. A dip means that something else was using the machine.",
    ),
    Panel(
        "Share of the device's peak (MFU)",
        "",
        ("mfu",),
        "Useful FLOPs relative to what this device reaches in one large matrix product.",
    ),
    Panel("Memory", "GiB, peak so far", ("memory_gib",), "Flat after the first steps unless something leaks."),
    Panel(
        "Steps skipped",
        "not finite, so far",
        ("skipped_steps",),
        "Steps whose loss or gradient was not finite; they did not update the weights.",
    ),
]
SMOOTH = ("learning_rate", "memory_gib", "skipped_steps")
COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea")
FEW = 20
"""Curves with fewer points have markers and are not smoothed."""
MAX_POINTS = 2_000
"""Maximum number of points per line: more than can be distinguished, and it limits the size of the page."""


def curves_png(run: Path, path: Path, columns: int = 3) -> None:
    """Writes the run's curves as one image."""
    from matplotlib.figure import Figure

    metrics = read_metrics(run / METRICS, skip_bad=True)
    panels = panels_of(metrics)
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(3.9 * columns, 2.6 * rows), layout="constrained")
    for index, panel in enumerate(panels):
        _draw(figure.add_subplot(rows, columns, index + 1), panel, metrics, title=True)
    figure.savefig(path, format="png", dpi=110)


def curves_svg(run: Path, only: Sequence[Panel] | None = None) -> list[Curve]:
    """The run's curves, or `only` these panels, as inline SVG with text as text; those without data are left out."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    metrics = read_metrics(run / METRICS, skip_bad=True)
    curves = []
    for panel in panels_of(metrics) if only is None else _with_data(only, metrics):
        # Text is drawn with the page's font, so that the SVG is small and its text sharp.
        with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
            figure = Figure(figsize=(3.9, 2.3))
            # Fixed margins, wide enough for any tick label: measuring the labels takes as long as drawing them.
            _draw(figure.add_axes((0.2, 0.19, 0.78, 0.78)), panel, metrics, title=False)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True)
        text = buffer.getvalue()
        curves.append(Curve(panel.title, text[text.index("<svg") :], panel.meaning))
    return curves


def panels_of(metrics: Sequence[dict[str, Any]]) -> list[Panel]:
    """The panels of a run: for pretraining its loss, for reinforcement what its environment measures."""
    names = {name for m in metrics for name in m}
    if "reward/mean" not in names:
        return _with_data([LOSS, *TRAINING], metrics)
    parts = tuple(sorted(n for n in names if n.startswith("reward/") and n.endswith("/mean") and n.count("/") == 2))
    panels = []
    for panel in REINFORCEMENT:
        if panel.title == "Rewards by name":
            panel = Panel(panel.title, panel.unit, parts if len(parts) > 1 else (), panel.meaning)
        same = panel.names == ("validation/reward",) and _equal(metrics, "validation/reward", "validation/accuracy")
        if not same:
            panels.append(panel)
    # Without the policy's loss, which on policy is near 0 regardless of progress.
    return _with_data([*panels, *TRAINING], metrics)


def _with_data(panels: Sequence[Panel], metrics: Sequence[dict[str, Any]]) -> list[Panel]:
    return [p for p in panels if any(any(_series(metrics, name)[1]) for name in p.names)]


def _equal(metrics: Sequence[dict[str, Any]], first: str, second: str) -> bool:
    return _series(metrics, first) == _series(metrics, second)


def _draw(axis: Any, panel: Panel, metrics: Sequence[dict[str, Any]], title: bool) -> None:
    drawn = [(name, *_series(metrics, name)) for name in panel.names]
    for (name, steps, values), color in zip((d for d in drawn if d[1]), COLORS):
        few = len(values) < FEW
        # Curves that are smooth anyway are drawn without a moving average.
        smooth = few or name in SMOOTH
        label = _label(name, panel) if smooth else None
        marker, alpha = "o" if few else "", 1.0 if smooth else 0.25
        style = {"linewidth": 1.2, "marker": marker, "markersize": 4}
        axis.plot(*_thinned(steps, values), color=color, alpha=alpha, label=label, **style)
        if not smooth:
            axis.plot(*_thinned(steps, _smoothed(values)), color=color, linewidth=1.8, label=_label(name, panel))
    if sum(bool(steps) for _, steps, _ in drawn) > 1:
        for text in axis.legend(fontsize=7).get_texts():
            text.set_parse_math(False)  # a reward's name may contain a $
    if title:
        axis.set_title(panel.title, fontsize=10, loc="left", fontweight="bold")
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.set_xlabel("step", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


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


def _thinned(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `MAX_POINTS` points: the lowest and the highest of each interval, so that no spike is lost."""
    stretch = -(-2 * len(values) // MAX_POINTS)
    if stretch <= 2:
        return list(steps), list(values)
    chosen = []
    for start in range(0, len(values), stretch):
        indices = range(start, min(start + stretch, len(values)))
        chosen += sorted({min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)})
    return [steps[index] for index in chosen], [values[index] for index in chosen]


def _label(name: str, panel: Panel) -> str:
    """`reward/format/mean` -> format; `rollout/tokens_per_second` -> rollout; `tokens_per_second` -> training.

    If all names of a panel share their first part, the second part is used.
    """
    parts = name.split("/")
    if len(parts) == 1:
        return "training"
    alike = len(panel.names) > 1 and len({other.split("/")[0] for other in panel.names}) == 1
    return parts[1] if len(parts) == 3 or alike else parts[0]
