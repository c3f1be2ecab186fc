"""What a reinforcement step reports: times, rollouts in figures, and whether it is time for a check."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config import RLConfig
from lockstep.observe import Timeline
from lockstep.rl.parity import Parity, ParityError
from lockstep.rl.rollouts import Rollout


class Stopwatch:
    """Seconds between laps, and in all; each lap is also a phase of `timeline`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._began = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._timeline.add(name.removeprefix("time/"), self._last, now)
        self._last = now

    def metrics(self) -> dict[str, float]:
        return {**self._laps, "time/step": self._last - self._began}


def due(step: int, every: int, last: int) -> bool:
    """Every `every` steps (0: never) and at the last one."""
    return step == last or (every > 0 and step % every == 0)


def accepted(parity: Parity, config: RLConfig, step: int) -> Parity:
    """Stops the run, or warns, where a step's log-probabilities differ. Raises ParityError."""
    if parity.tokens_different:
        message = (
            f"step {step}: {parity.tokens_different} of {parity.tokens_checked} log-probabilities differ between "
            f"generator and trainer (by up to {parity.max_delta:.3e}); the first is {parity.first}"
        )
        if config.on_parity_error == "stop":
            raise ParityError(message + ". Set on_parity_error = warn to go on regardless")
        warnings.warn(message, stacklevel=2)
    return parity


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over a step's rollouts, under the run's metric names."""
    rewards = [r.reward for r in rollouts]
    advantages = [r.advantage for r in rollouts]
    count = len(rollouts)
    mean = math.fsum(rewards) / count
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((r - mean) * (r - mean) for r in rewards) / count),
        **{f"reward/{name}/mean": sum(r.rewards[name] for r in rollouts) / count for name in rollouts[0].rewards},
        "advantage/mean": math.fsum(advantages) / count,
        "advantage/abs_max": max(map(abs, advantages)),
        "rollout/tokens_mean": sum(len(r.token_ids) for r in rollouts) / count,
        "rollout/truncated": sum(r.finish_reason == "length" for r in rollouts) / count,
        "policy/staleness_max": 0.0,
    }


def summarize(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A run in figures, from its metrics: the first and last validation, and the comparison of all steps."""
    validations = [m for m in metrics if "validation/accuracy" in m]
    compared = [m for m in metrics if "parity/tokens_checked" in m]
    return {
        "reward_before": validations[0]["validation/reward"],
        "reward_after": validations[-1]["validation/reward"],
        "accuracy_before": validations[0]["validation/accuracy"],
        "accuracy_after": validations[-1]["validation/accuracy"],
        "parity_tokens_checked": sum(m["parity/tokens_checked"] for m in compared),
        "parity_tokens_different": sum(m["parity/tokens_different"] for m in compared),
        "ratio_max_on_first_inner_step": max(m["policy/ratio_first_max"] for m in compared),
    }
