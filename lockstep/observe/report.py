"""report.html: curves, samples and the parity table of a run, in one file that needs no server."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.observe.curves import curves_svg
from lockstep.observe.metrics import read_metrics
from lockstep.observe.run_folder import CONFIG, METRICS

SAMPLES = 8
TEMPLATE = Path(__file__).with_name("report.html.jinja")


def write_report(run: Path, title: str = "Lockstep run") -> Path:
    """Writes `report.html` into the run's folder from what is there, and returns its path.

    A run without rollouts, without a summary, or one that was interrupted gets the parts that it has.
    """
    from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text())
    rollouts = sorted(run.glob("rollouts/step_*.jsonl"))
    metrics = read_metrics(run / METRICS)
    page = template.render(
        title=title,
        summary=_json(run / "summary.json"),
        figures=_figures(metrics),
        curves=curves_svg(run),
        parity=_parity(metrics),
        samples=[(name, _samples(path)) for name, path in zip(("before", "after"), _ends(rollouts))],
        config=(run / CONFIG).read_text() if (run / CONFIG).is_file() else "",
    )
    partial = run / "report.html.partial"
    partial.write_text(page)
    return partial.replace(run / "report.html")


def _ends(paths: list[Path]) -> list[Path]:
    return [paths[0], paths[-1]] if len(paths) > 1 else paths


def _samples(path: Path) -> list[dict[str, Any]]:
    """Rollouts of different prompts, as many as the report shows."""
    chosen: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        rollout = json.loads(line)
        chosen.setdefault(rollout["group"], rollout)
    return list(chosen.values())[:SAMPLES]


def _figures(metrics: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """A pretraining run in figures: where it ended, and how fast it went in the middle of its steps."""
    steps = [m for m in metrics if m.get("mfu") is not None]
    if not steps:
        return []
    validations = [m["validation/loss"] for m in steps if m.get("validation/loss") is not None]
    figures = [(f"{steps[-1]['step']:,}", "steps")]
    if steps[-1]["loss"] is not None:
        figures.append((f"{steps[-1]['loss']:.4f}", "loss"))
    if validations:
        figures.append((f"{validations[-1]:.4f}", "validation loss"))
    figures += [
        (f"{median(m['tokens_per_second'] for m in steps):,.0f}", "tokens a second"),
        (f"{100 * median(m['mfu'] for m in steps):.0f} %", "of the device's peak (MFU)"),
        (f"{steps[-1]['memory_gib']:.2f} GiB", "memory of rank 0"),
    ]
    if steps[-1]["skipped_steps"]:
        figures.append((f"{steps[-1]['skipped_steps']:.0f}", "steps skipped, not finite"))
    return figures


def _parity(metrics: list[dict[str, Any]]) -> dict[str, float] | None:
    checked = [m for m in metrics if m.get("parity/tokens_checked")]
    if not checked:
        return None
    return {
        "steps": len(checked),
        "checked": sum(m["parity/tokens_checked"] for m in checked),
        "different": sum(m["parity/tokens_different"] for m in checked),
        "max_delta": max(m["parity/max_delta"] for m in checked),
        "ratio": max(m.get("policy/ratio_first_max", 1.0) for m in checked),
    }


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
