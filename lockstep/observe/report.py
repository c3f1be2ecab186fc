"""report.html: curves, samples and the parity table of a run, in one file that needs no server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.config import ALARMS, CONFIG
from lockstep.observe.curves import LOSS, curves_svg
from lockstep.observe.expert_load import expert_load_svg
from lockstep.observe.metrics import read_metrics
from lockstep.observe.readable import readable_rollouts
from lockstep.observe.run_folder import METRICS
from lockstep.observe.token_view import channels, shown_steps, visible

SAMPLES = 12
MAX_BYTES = 5_000_000
"""Size limit of a report; if a run would need more, fewer tokens are shown."""
TOKENS = (12_000, 2_000, 0)
"""Tokens shown one by one; the first of these numbers that fits."""
LONGEST = 2_000
"""Characters of a prompt or completion in a table."""
TEMPLATE = Path(__file__).with_name("report.html.jinja")
PRETRAINING_LOSS = replace(LOSS, title="Loss in pretraining")
STAGES = {"pretrain": "pretraining", "rl": "reinforcement", "sft": "fine-tuning"}


@dataclass(frozen=True)
class Figure:
    """A number, its name, and an explanation for someone who sees it for the first time."""

    value: str
    name: str
    meaning: str = ""
    state: str = ""
    """`good` or `bad`, if it is either."""


@dataclass(frozen=True)
class Sample:
    """A validation prompt with its samples in the first and the last validation."""

    prompt: str
    answer: str
    before: dict[str, Any]
    after: dict[str, Any]


def write_report(
    run: Path,
    title: str = "Lockstep run",
    introduction: str = "",
    pretraining: Path | None = None,
    steps: Sequence[int] = (),
) -> Path:
    """Writes `report.html` into the run's folder from the files there; returns its path.

    pretraining: the run that this one started from, to plot its loss too. steps: the steps of a reinforcement run whose
    rollouts are shown; empty: the first, a middle and the last one. For a run without rollouts or summary, or an
    interrupted one, the report has the available parts. Raises UserError for a step without rollouts.
    """
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_visible)
    environment.filters["clip"] = _clipped
    template = environment.from_string(TEMPLATE.read_text())
    metrics = read_metrics(run / METRICS, skip_bad=True)
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").is_file() else {}
    parity = _parity(metrics)
    stale = any(m.get("policy/staleness_max") for m in metrics)
    curves = [*(curves_svg(pretraining, [PRETRAINING_LOSS]) if pretraining is not None else []), *curves_svg(run)]
    if load := expert_load_svg(run):
        curves.append(load)
    for most_tokens in TOKENS:
        shown = shown_steps(run, steps, most_tokens)
        page = template.render(
            title=title,
            introduction=introduction,
            figures=[*_results(summary), *_speed(metrics), *_parity_figure(parity, stale), *_totals(summary)],
            alarms=_alarms(metrics),
            curves=curves,
            parity=parity,
            samples=_samples(run),
            shown=shown,
            channels=channels(shown),
            config=(run / CONFIG).read_text(errors="replace") if (run / CONFIG).is_file() else "",
        )
        if len(page.encode()) < MAX_BYTES:
            break
    partial = run / "report.html.partial"
    partial.write_text(page)
    return partial.replace(run / "report.html")


def _clipped(value: Any, longest: int = LONGEST) -> str:
    text = str(value)
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest:,} characters left out)"


def _visible(value: Any) -> Any:
    """Escapes control characters in texts of models and data; the report's HTML is not changed."""
    return visible(value) if type(value) is str else value


@dataclass(frozen=True)
class Alarm:
    """An alarm of a reinforcement run: when it was raised, and what it means."""

    name: str
    steps: str
    meaning: str


def _alarms(metrics: list[dict[str, Any]]) -> list[Alarm]:
    """Every alarm that was raised, with the first steps of its occurrences."""
    names = sorted({name for m in metrics for name in m if name.startswith("alarm/")})
    raised = []
    for name in names:
        begun = [m["step"] for before, m in zip([{}, *metrics], metrics) if name in m and name not in before]
        count = sum(name in m for m in metrics)
        first = ", ".join(map(str, begun[:5])) + (", …" if begun[5:] else "")
        alarm = name.removeprefix("alarm/")
        raised.append(Alarm(alarm, f"from step {first}; {count} in all", ALARMS.get(alarm, "")))
    return raised


def _results(summary: dict[str, Any]) -> list[Figure]:
    """The environment's measures before and after reinforcement."""
    figures = []
    held_out = "prompts that were never trained on"
    if also_trained := int(summary.get("validation_also_trained", 0)):
        held_out = f"prompts, {also_trained} of which are also trained on"
    accuracy, reward = validated(summary, "accuracy"), validated(summary, "reward")
    if accuracy:
        values, when = accuracy
        figures.append(
            Figure(" → ".join(values), "held-out accuracy", f"Share of correct answers {when}, on {held_out}.")
        )
    if reward and reward != accuracy:
        values, when = reward
        name = f"held-out {summary.get('reward_name', 'reward')}"
        figures.append(Figure(" → ".join(values), name, f"Mean reward {when}, on {held_out}."))
    return figures


def validated(summary: dict[str, Any], measured: str) -> tuple[list[str], str] | None:
    """The results of the first and the last validation, and when they ran: `(["0.443", "0.950"], "before and after")`;
    None without validations."""
    ends = {"before": "before the first step", "after": "after the last step"}
    values = {end: f"{summary[f'{measured}_{end}']:.3f}" for end in ends if f"{measured}_{end}" in summary}
    when = "before and after" if len(values) == 2 else "".join(ends[end] for end in values)
    return (list(values.values()), when) if values else None


def _speed(metrics: list[dict[str, Any]]) -> list[Figure]:
    """The figures of a pretraining run: its final values, and its median speed."""
    steps = [m for m in metrics if m.get("tokens_per_second") is not None]
    if not steps:
        return []
    validations = [m["validation/loss"] for m in steps if m.get("validation/loss") is not None]
    figures = [Figure(f"{steps[-1]['step']:,}", "steps", "Updates of the weights.")]
    if steps[-1].get("loss") is not None:
        meaning = "Mean cross-entropy per token at the last step, in nats; exp(loss) is the perplexity."
        figures.append(Figure(f"{steps[-1]['loss']:.4f}", "loss", meaning))
    if validations:
        figures.append(Figure(f"{validations[-1]:.4f}", "validation loss", "Loss on held-out text."))
    speed = median(m["tokens_per_second"] for m in steps)
    figures.append(Figure(f"{speed:,.0f}", "tokens per second", "Median over steps."))
    if shares := [m["mfu"] for m in steps if m.get("mfu") is not None]:
        meaning = "Useful FLOPs relative to what the device reaches in one large matrix product."
        figures.append(Figure(f"{100 * median(shares):.0f} %", "of the device's peak (MFU)", meaning))
    if (memory := steps[-1].get("memory_gib")) is not None:
        figures.append(Figure(f"{memory:.2f} GiB", "memory of rank 0", "Peak."))
    if skipped := steps[-1].get("skipped_steps"):
        figures.append(Figure(f"{skipped:.0f}", "steps skipped", "Their loss or gradient was not finite.", "bad"))
    return figures


def _parity_figure(parity: dict[str, Any] | None, stale: bool) -> list[Figure]:
    if parity is None:
        return []
    value = f"{parity['different']:,.0f} of {parity['checked']:,.0f}"
    state = "bad" if parity["different"] else "good"
    meaning = parity_meaning(int(parity["checked"]), int(parity["different"]), stale)
    return [Figure(value, "log-probabilities differ", meaning, state)]


def parity_meaning(checked: int, different: int, stale: bool = False) -> str:
    """The result of comparing trainer and generator, as text. stale: tokens sampled from older weights, which are not
    compared, were trained on."""
    if not checked:
        return (
            "Nothing was compared: no token that was trained on had been sampled from the weights it was trained with, "
            "so it is not known whether the generator computes what the trainer does."
        )
    if different:
        return (
            f"The generator and the trainer computed different log-probabilities for {different:,} of the {checked:,} "
            "sampled tokens, so the policy gradient was off by as much as the importance ratios differ from 1."
        )
    if stale:
        return (
            "The generator and the trainer computed the same log-probability, to the last bit, for every token that "
            "was sampled from the weights it was trained with. Tokens of older weights (actors.max_staleness) have no "
            "counterpart to compare with: they are trained on with the log-probabilities they were sampled with."
        )
    return (
        "The generator and the trainer computed the same log-probability, to the last bit, for every token that was "
        "trained on, so the gradient of the first update on each batch is exactly on policy."
    )


def _totals(summary: dict[str, Any]) -> list[Figure]:
    """Total time and tokens of all stages."""
    figures = []
    if seconds := summary.get("seconds"):
        parts = ", ".join(f"{STAGES.get(name, name)} {duration(value)}" for name, value in seconds.items())
        begun = summary.get("resumed_from")
        name = f"since step {begun:.0f}" if begun else "total time"
        figures.append(Figure(duration(sum(seconds.values())), name, parts[:1].upper() + parts[1:] + "."))
    if tokens := summary.get("tokens"):
        trained = sum(count for name, count in tokens.items() if name != "generated")
        figures.append(Figure(in_tokens(trained), "tokens trained on", tokens_meaning(tokens)))
    return figures


def tokens_meaning(tokens: dict[str, int]) -> str:
    """`{"pretrained": 8e5, "generated": 9e4, "trained": 4e5}` as text."""
    words = {"pretrained": "in pretraining", "trained": "in reinforcement"}
    parts = " and ".join(f"{in_tokens(tokens[name])} {word}" for name, word in words.items() if name in tokens)
    return f"{parts}; the model generated {in_tokens(tokens.get('generated', 0))} of them itself."


def duration(seconds: float) -> str:
    """`47 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def in_tokens(count: float) -> str:
    """`950`, `82,000`, `1.3 million`."""
    return f"{count / 1e6:.1f} million" if count >= 1e6 else f"{round(count, -3 if count >= 1e4 else 0):,.0f}"


def _samples(run: Path) -> list[Sample]:
    """Validation prompts with their first and last samples; empty with fewer than two validations."""
    validations = sorted(run.glob("rollouts/validation_*.jsonl"))
    if len(validations) < 2:
        return []
    first, last = (
        {(r["prompt"], r["group"]): r for r in readable_rollouts(path)} for path in (validations[0], validations[-1])
    )
    both = [key for key in first if key in last][:SAMPLES]
    return [Sample(key[0], first[key]["answer"], first[key], last[key]) for key in both]


def _parity(metrics: list[dict[str, Any]]) -> dict[str, Any] | None:
    checked = [m for m in metrics if m.get("parity/tokens_checked")]
    if not checked:
        return None
    return {
        "steps": len(checked),
        "checked": sum(m["parity/tokens_checked"] for m in checked),
        "different": sum(m.get("parity/tokens_different") or 0 for m in checked),
        "max_delta": max(m.get("parity/max_delta") or 0.0 for m in checked),
        "ratio": max(m.get("policy/ratio_first_max") or 1.0 for m in checked),
    }
