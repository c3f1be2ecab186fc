"""What a reinforcement step reports: times, statistics of its rollouts, and whether it is time for a check."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from lockstep.observe import Timeline
from lockstep.rl.environments.protocol import Environment
from lockstep.rl.rollouts.eval_metrics import eval_metrics
from lockstep.rl.rollouts.records import Rollout, episodes_of

PERCENTILES = (10, 50, 90)
ROUTES = ("routes_checked", "routes_different")
PAIRS = 32
"""Most pairs of completions compared per group: all pairs for up to eight completions."""


class Stopwatch:
    """Seconds of a step's laps, and in total. A lap is also a phase of `timeline`; laps of the same name add up."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._began = self._last = time.perf_counter()
        self._lap = ""
        self._laps: dict[str, float] = {}

    def begin(self, lap: str, waits_for: str = "", patience: float = 0.0) -> None:
        """Starts a lap and ends the one before. `waits_for` and `patience` are the phase's, for the hang detection."""
        now = time.perf_counter()
        if self._lap:
            self._laps[self._lap] = self._laps.get(self._lap, 0.0) + now - self._last
            self._timeline.add(self._lap.removeprefix("time/"), self._last, now)
        self._lap, self._last = lap, now
        self._timeline.enter(lap.removeprefix("time/"), waits_for, patience)

    def end(self) -> None:
        """Ends the last lap; what follows in the step belongs to none."""
        self.begin("record")
        self._lap = ""

    def metrics(self) -> dict[str, float]:
        """Seconds, and each lap's share of the step."""
        whole = self._last - self._began
        shares = {lap.replace("time/", "time/share/"): seconds / whole for lap, seconds in self._laps.items()}
        return {**self._laps, "time/step": whole, **shares}


def due(step: int, every: int, last: int) -> bool:
    """Every `every` steps (0: never) and at the last one."""
    return step == last or (every > 0 and step % every == 0)


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over a step's rollouts, by metric name; of rewards, over those that count.

    A conversation of several rows counts once, except for its tokens.
    """
    episodes = episodes_of(rollouts)
    rows, rollouts = rollouts, [of_episode[-1] for of_episode in episodes]
    counting = [r for r in rollouts if r.scores.counts]
    rewards = [r.scores.reward for r in counting]
    advantages = [r.scores.advantage for r in counting]
    count = len(rollouts)
    mean = math.fsum(rewards) / len(rewards)
    groups = [{r.scores.reward for r in group} for _, group in groupby(counting, key=lambda r: r.group)]
    tokens_by_group = [
        [[token for r in of_episode for token in r.sampled_ids()] for of_episode in group]
        for _, group in groupby(episodes, key=lambda of_episode: of_episode[0].group)
    ]
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((r - mean) * (r - mean) for r in rewards) / len(rewards)),
        **_percentiles("reward/total", rewards),
        "reward/groups_without_spread": sum(len(group) == 1 for group in groups) / len(groups),
        **{f"reward/{name}/mean": value for name, value in _means(rollouts).items()},
        **_failures("reward", rollouts),
        "advantage/mean": math.fsum(advantages) / len(advantages),
        "advantage/abs_max": max(map(abs, advantages)),
        "rollout/tokens": sum(r.num_sampled for r in rows),
        "rollout/prompt_tokens": sum(len(r.prompt_ids) for r in rows),
        "rollout/tokens_mean": sum(r.num_sampled for r in rows) / count,
        **_percentiles("rollout/tokens", [sum(r.num_sampled for r in of_episode) for of_episode in episodes]),
        "rollout/truncated": sum(r.finish_reason == "length" for r in rollouts) / count,
        "diversity/distinct": sum(map(distinct_share, tokens_by_group)) / len(tokens_by_group),
        "diversity/overlap": sum(map(pairwise_overlap, tokens_by_group)) / len(tokens_by_group),
        **_conversations(rows),
    }


def distinct_share(group: Sequence[Sequence[int]]) -> float:
    """The fraction of a group's completions that are distinct, by their tokens."""
    return len({tuple(tokens) for tokens in group}) / len(group)


def pairwise_overlap(group: Sequence[Sequence[int]]) -> float:
    """The mean overlap of two completions of a group: the Jaccard index |A ∩ B| / |A ∪ B| of their sets of bigrams.

    A completion's bigrams are its pairs of consecutive tokens, including a start marker with its first token, so a
    single token has one. 1: all are the same; 0: no bigram is shared, also for a group of one. In larger groups `PAIRS`
    pairs are compared: neighbors first, then those two apart, and so on.
    """
    bigrams = [set(zip([None, *tokens], tokens)) for tokens in group]
    overlaps = [_jaccard(bigrams[first], bigrams[second]) for first, second in _pairs(len(group))]
    return sum(overlaps) / len(overlaps) if overlaps else 0.0


def _jaccard(first: set[tuple[int | None, int]], second: set[tuple[int | None, int]]) -> float:
    together = len(first | second)
    return len(first & second) / together if together else 1.0


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    pairs = ((first, first + apart) for apart in range(1, count) for first in range(count - apart))
    return (pair for pair, _ in zip(pairs, range(PAIRS)))


def staleness_metrics(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    """How many versions behind the weights were that sampled the tokens of `step`: maximum and mean and, if any are
    behind, the share of tokens by staleness."""
    behind = Counter(age for rollout in rollouts for age in rollout.staleness(step - 1))
    if not behind:
        return {"policy/staleness_max": 0.0}
    shares = {f"policy/staleness/{age}": count / behind.total() for age, count in sorted(behind.items())}
    return {
        "policy/staleness_max": float(max(behind)),
        "policy/staleness_mean": sum(age * count for age, count in behind.items()) / behind.total(),
        **(shares if any(behind) else {}),
    }


def _conversations(rows: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of conversations; empty if there are none."""
    last_rows = [of_episode[-1] for of_episode in episodes_of(rows)]
    conversations = [row.conversation for row in last_rows if row.conversation is not None]
    if not conversations:
        return {}
    return {
        "rollout/turns_mean": sum(c.turns for c in conversations) / len(conversations),
        "rollout/tool_calls_mean": sum(c.tool_calls for c in conversations) / len(conversations),
        "rollout/rows_mean": sum(r.num_sampled > 0 for r in rows) / len(conversations),
        "rollout/limit_reached": sum(c.over for c in conversations) / len(conversations),
        "rollout/environment_seconds": math.fsum(c.environment_seconds for c in conversations),
        "rollout/environment_tokens": sum(len(r.token_ids) - r.num_sampled for r in rows),
        **{
            f"rollout/tool_seconds/{_escaped(name)}": math.fsum(c.tool_seconds.get(name, 0.0) for c in conversations)
            for name in sorted({name for c in conversations for name in c.tool_seconds})
        },
    }


def validation_metrics(rollouts: Sequence[Rollout], environment: Environment) -> dict[str, float]:
    """The results of `eval_metrics` for held-out completions as `validation/…`; the accuracy is pass@1.

    With k completions per prompt, also pass@k over the prompts that have k.
    """
    samples = max(Counter(rows[-1].group for rows in episodes_of(rollouts)).values(), default=1)
    evaluated = eval_metrics(rollouts, environment)
    pass_at = evaluated.pass_at
    if samples > 1:
        pass_at = pass_at | eval_metrics(rollouts, environment, [samples]).pass_at
    metrics = {f"validation/{_escaped(name)}": reward.mean for name, reward in evaluated.rewards.items()}
    for k, estimate in pass_at.items():
        name = "accuracy" if k == 1 else f"pass@{k}"
        metrics[f"validation/{name}"] = estimate.mean
        if estimate.standard_error is not None:
            metrics[f"validation/{name}_stderr"] = estimate.standard_error
    metrics["validation/reward"] = evaluated.reward.mean if evaluated.reward else 0.0
    return metrics | {f"validation/failed/{cause}": count for cause, count in evaluated.failed.items()}


def _means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of each named reward over the rollouts that have it: all but those whose reward failed."""
    graded = [r for r in rollouts if not r.scores.failure]
    names = graded[0].scores.rewards if graded else ()
    return {_escaped(name): sum(r.scores.rewards[name] for r in graded) / len(graded) for name in names}


def _escaped(name: str) -> str:
    """A reward's name as part of a metric's, without separators and unprintable characters."""
    return "".join(c if c.isprintable() and c not in "/%" else f"%{ord(c):02x}" for c in name)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """The 10th, 50th and 90th percentile (nearest rank)."""
    ordered = sorted(values)
    return {f"{name}_p{p}": float(ordered[math.ceil(p / 100 * len(ordered)) - 1]) for p in PERCENTILES}


def _failures(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How many rewards failed, by cause; empty if none did."""
    causes = Counter(r.scores.failure for r in rollouts if r.scores.failure)
    return {f"{prefix}/failed/{cause}": count for cause, count in sorted(causes.items())}


def summarize(metrics: Sequence[Mapping[str, Any]], updates_per_batch: int = 1) -> dict[str, Any]:
    """A run's summary from its metrics: the validations before the first step and after the last one, if there were
    any, the comparison over all steps, and tokens."""
    compared = [m for m in metrics if "parity/tokens_checked" in m]
    routed = [m for m in compared if "parity/routes_checked" in m]
    ends = {"before": next((m for m in metrics if m["step"] == 0), {}), "after": metrics[-1]}
    validated = {end: each for end, each in ends.items() if "validation/reward" in each}
    # The answers of one of them may all have failed.
    measured = [n for n in ("reward", "accuracy") if all(f"validation/{n}" in each for each in validated.values())]
    rewards = sorted(
        {
            n.split("/")[1]
            for m in compared
            for n in m
            if n.startswith("reward/") and n.endswith("/mean") and n.count("/") == 2
        }
    )
    return {
        **{f"{n}_{end}": each[f"validation/{n}"] for end, each in validated.items() for n in measured},
        # The reward's name in the environment if there is only one.
        "reward_name": rewards[0] if len(rewards) == 1 else "reward",
        "tokens": {
            "generated": sum(m.get("rollout/tokens", 0) for m in compared),
            "trained": updates_per_batch * sum(m.get("rollout/tokens_trained", 0) for m in compared),
        },
        "parity_tokens_checked": sum(m["parity/tokens_checked"] for m in compared),
        "parity_tokens_different": sum(m["parity/tokens_different"] for m in compared),
        **{f"parity_{name}": sum(m[f"parity/{name}"] for m in routed) for name in ROUTES if routed},
        "staleness_max": max(m.get("policy/staleness_max", 0.0) for m in compared),
        "ratio_max_on_first_inner_step": max(m["policy/ratio_first_max"] for m in compared),
    }
