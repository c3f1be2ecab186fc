"""Known failure modes of a run, detected in its metrics: each a sentence that names the cause and what to check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, isfinite
from typing import Any

from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.config import ALARMS, AlarmConfig
from lockstep.errors import RunStopped
from lockstep.observe import log

Metrics = Mapping[str, Any]
PREFIX = "alarm/"
"""Prefix of metrics that are 1 at every step that raises the alarm."""


COMPARED = (
    "step",
    "loss",
    "reward/groups_without_spread",
    "reward/mean",
    "reward/std",
    "reward/overlong/mean",
    "validation/reward",
    "rollout/tokens_mean",
    "rollout/truncated",
    "policy/entropy",
)
"""The metrics of earlier steps that alarms read. Keeping all of them would cost 10 KiB per step."""


class Alarms:
    """A `StepObserver` of a run's metrics from its first step; `history`: those of the run that is resumed."""

    prefix = PREFIX

    def __init__(self, config: AlarmConfig, history: Sequence[Metrics] = (), learns_from_spread_alone: bool = True):
        self.config, self.history = config, [_compared(metrics) for metrics in history]
        self.learns_from_spread_alone = learns_from_spread_alone
        self._raised: dict[str, str] = {}

    def observe(self, step: int, metrics: Metrics) -> dict[str, Any]:
        """Warns about each alarm that this step raises and the step before did not; returns `alarm/NAME` of each."""
        now = {"step": step, **metrics}
        self._raised = alarms([*self.history, now], self.config, self.learns_from_spread_alone)
        before = self.history[-1] if self.history else {}
        for name, sentence in self._raised.items():
            if PREFIX + name not in before:
                log.warning("alarm %s at step %d: %s", name, step, sentence)
        raised = {PREFIX + name: 1.0 for name in self._raised}
        self.history.append(_compared(now | raised))
        return raised

    def rewind(self, checkpoints: Checkpoints) -> None:
        """No alarm rewinds a run."""

    def ending(self) -> RunStopped | None:
        """The error that ends the run, if `alarms.stop` names an alarm that the last step raised."""
        for name in self.config.stop:
            if sentence := self._raised.get(name):
                return RunStopped(
                    f"step {self.history[-1]['step']}: alarm {name}, which is in alarms.stop: {sentence}. The run ends "
                    "here; --resume continues from the newest checkpoint",
                    exit_code=1,
                )
        return None


def _compared(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if name in COMPARED or name.startswith(PREFIX)}


def alarms(history: Sequence[Metrics], config: AlarmConfig, learns_from_spread_alone: bool = True) -> dict[str, str]:
    """The alarms that the last step raises, with their sentences; none for a validation before the first step.

    history: all metrics of the run so far, as in its metrics.jsonl; values may be None. Nothing else is used, so a
    resumed run raises the same alarms as an uninterrupted one.
    """
    if not history or "loss" not in history[-1]:
        return {}
    steps = [m for m in history if "loss" in m]
    raised = {
        "no_signal": _no_signal(steps, config) if learns_from_spread_alone else "",
        "reward_gap": _reward_gap(history, steps, config),
        "length": _length(steps, config),
        "entropy": _entropy(steps, config),
        "ratio": _ratio(steps[-1], config),
        "kl": _kl(steps[-1], config),
    }
    return {name: f"{evidence}: {ALARMS[name]}" for name, evidence in raised.items() if evidence}


def _no_signal(steps: Sequence[Metrics], config: AlarmConfig) -> str:
    last = steps[-config.no_signal :]
    if not config.no_signal or len(last) < config.no_signal:
        return ""
    silent = all(m.get("reward/groups_without_spread") == 1 for m in last)
    return f"in {config.no_signal} steps in a row" if silent else ""


def _reward_gap(history: Sequence[Metrics], steps: Sequence[Metrics], config: AlarmConfig) -> str:
    validations = [m for m in history if m.get("validation/reward") is not None]
    if not config.reward_gap or len(validations) < 2:
        return ""
    # Between validations the gap is that of the last one.
    steps = [m for m in steps if m["step"] <= validations[-1]["step"]]
    best = max(validations[:-1], key=lambda m: float(m["validation/reward"]))
    # The steps up to the best validation; a validation before the first step uses the first window.
    until = max(int(best["step"]), config.window)
    before = [_reward(m) for m in steps if until - config.window < m["step"] <= until]
    now = [_reward(m) for m in steps[-config.window :]]
    if not before or not steps or steps[-1]["step"] < until + config.window:
        return ""
    rise, fall = _mean(now) - _mean(before), best["validation/reward"] - validations[-1]["validation/reward"]
    spread = _mean([m["reward/std"] for m in steps[-config.window :]])
    if rise <= 0 or fall <= 0 or rise + fall <= config.reward_gap * spread:
        return ""
    return (
        f"since the validation after step {best['step']} the mean reward went from {_mean(before):.3g} to "
        f"{_mean(now):.3g}, and the validation reward from {best['validation/reward']:.3g} to "
        f"{validations[-1]['validation/reward']:.3g}"
    )


def _reward(metrics: Metrics) -> float:
    """As validations measure it: without the penalty for overlong completions."""
    return float(metrics["reward/mean"]) - float(metrics.get("reward/overlong/mean", 0.0))


def _length(steps: Sequence[Metrics], config: AlarmConfig) -> str:
    first, last = _ends(steps, "rollout/tokens_mean", config.window)
    if not config.length or last is None or last <= config.length * max(first, 1.0):
        return ""
    truncated = _mean([m["rollout/truncated"] for m in steps[-config.window :]])
    return f"the mean length went from {first:.4g} to {last:.4g} tokens, and {100 * truncated:.0f} % are cut off"


def _entropy(steps: Sequence[Metrics], config: AlarmConfig) -> str:
    first, last = _ends(steps, "policy/entropy", config.window)
    if not config.entropy or last is None or last >= config.entropy * first:
        return ""
    return f"the entropy went from {first:.3g} to {last:.3g} nats per token"


def _ratio(step: Metrics, config: AlarmConfig) -> str:
    if not config.ratio:
        return ""
    for kind in ("policy/ratio", "off_policy/ratio"):
        low, high = step.get(f"{kind}_min"), step.get(f"{kind}_max")
        if high is not None and low is not None and (high > config.ratio or low * config.ratio < 1):
            return f"{kind} is between {low:.3g} and {high:.3g}"
    return ""


def _kl(step: Metrics, config: AlarmConfig) -> str:
    kl = step.get("policy/kl")
    return f"policy/kl is {kl:.3g} nats per token" if config.kl and kl is not None and abs(kl) > config.kl else ""


def _ends(steps: Sequence[Metrics], name: str, window: int) -> tuple[float, float | None]:
    """The metric's mean over the first and over the last `window` steps; None for the latter if they overlap."""
    values = [m[name] for m in steps if m.get(name) is not None and isfinite(m[name])]
    ends = values[:window], values[-window:]
    if len(values) < 2 * window:
        return 0.0, None
    return _mean(ends[0]), _mean(ends[1])


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)
