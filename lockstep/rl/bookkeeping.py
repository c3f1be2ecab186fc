"""What a reinforcement step reports: times, rollouts in figures, and whether it is time for a check."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from lockstep.config import RLConfig
from lockstep.model import Decoder
from lockstep.observe import Timeline
from lockstep.rl.environment import Environment
from lockstep.rl.explain import in_words
from lockstep.rl.parity import Parity, ParityError
from lockstep.rl.rollouts import Rollout


class Stopwatch:
    """Seconds between laps, and in all; each lap is also a phase of `timeline`, and laps of one name add up."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._began = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._timeline.add(name.removeprefix("time/"), self._last, now)
        self._last = now

    def metrics(self) -> dict[str, float]:
        return {**self._laps, "time/step": self._last - self._began}


def due(step: int, every: int, last: int) -> bool:
    """Every `every` steps (0: never) and at the last one."""
    return step == last or (every > 0 and step % every == 0)


def accepted(parity: Parity, config: RLConfig, step: int, model: Decoder) -> Parity:
    """Stops the run, or warns, where a step's log-probabilities differ. Raises ParityError."""
    if parity.tokens_different:
        message = (
            f"step {step}: {parity.tokens_different} of {parity.tokens_checked} log-probabilities differ between "
            f"generator and trainer (by up to {parity.max_delta:.3e}); the first is {parity.first}. "
            + in_words(model, parity.sequence)
        )
        if config.on_parity_error == "stop":
            raise ParityError(message + "; set on_parity_error = warn to go on regardless")
        warnings.warn(message, stacklevel=2)
    return parity


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over a step's rollouts, under the run's metric names."""
    rewards = [r.reward for r in rollouts]
    advantages = [r.advantage for r in rollouts]
    count = len(rollouts)
    mean = math.fsum(rewards) / count
    groups = [{r.reward for r in group} for _, group in groupby(rollouts, key=lambda r: r.group)]
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((r - mean) * (r - mean) for r in rewards) / count),
        "reward/groups_without_spread": sum(len(group) == 1 for group in groups) / len(groups),
        **{f"reward/{name}/mean": sum(r.rewards[name] for r in rollouts) / count for name in rollouts[0].rewards},
        "advantage/mean": math.fsum(advantages) / count,
        "advantage/abs_max": max(map(abs, advantages)),
        "rollout/tokens": sum(len(r.token_ids) for r in rollouts),
        "rollout/prompt_tokens": sum(len(r.prompt_ids) for r in rollouts),
        "rollout/tokens_mean": sum(len(r.token_ids) for r in rollouts) / count,
        "rollout/truncated": sum(r.finish_reason == "length" for r in rollouts) / count,
        "policy/staleness_max": 0.0,
    }


def validation_metrics(rollouts: Sequence[Rollout], environment: Environment) -> dict[str, float]:
    """Mean rewards of held-out completions as `validation/…`, and the accuracy where the environment knows of one."""
    count = len(rollouts)
    means = {f"validation/{n}": sum(r.rewards[n] for r in rollouts) / count for n in rollouts[0].rewards}
    if environment.knows_correct(rollouts[0].rewards):
        means["validation/accuracy"] = sum(environment.is_correct(r.rewards) for r in rollouts) / count
    means["validation/reward"] = sum(r.reward for r in rollouts) / count
    return means


def summarize(metrics: Sequence[Mapping[str, Any]], inner_steps: int = 1) -> dict[str, Any]:
    """A run in figures, from its metrics: the first and last validation, all steps' comparison, and tokens."""
    validations = [m for m in metrics if "validation/reward" in m]
    compared = [m for m in metrics if "parity/tokens_checked" in m]
    measured = ("reward", "accuracy") if "validation/accuracy" in validations[0] else ("reward",)
    rewards = sorted({n.split("/")[1] for m in compared for n in m if n.startswith("reward/") and n.count("/") == 2})
    return {
        **{f"{n}_before": validations[0][f"validation/{n}"] for n in measured},
        **{f"{n}_after": validations[-1][f"validation/{n}"] for n in measured},
        # The environment's own name, where its reward has but one.
        "reward_name": rewards[0] if len(rewards) == 1 else "reward",
        "tokens": {
            "generated": sum(m.get("rollout/tokens", 0) for m in compared),
            "trained": inner_steps * sum(m.get("rollout/tokens_trained", 0) for m in compared),
        },
        "parity_tokens_checked": sum(m["parity/tokens_checked"] for m in compared),
        "parity_tokens_different": sum(m["parity/tokens_different"] for m in compared),
        "ratio_max_on_first_inner_step": max(m["policy/ratio_first_max"] for m in compared),
    }
