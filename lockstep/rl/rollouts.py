"""A completion with everything that is known about it, and its line in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.rl.environment import Example


@dataclass
class Rollout:
    """One sampled completion of an example."""

    example: Example
    group: int
    """Rollouts of one prompt share it."""
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """The generator's, of each sampled token, over the whole vocabulary."""
    finish_reason: str
    completion: str
    version: int
    """Of the weights that sampled it."""
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0
    """Of the completion; the mean over its tokens where they have their own."""
    token_advantages: list[float] = field(default_factory=list)
    """Of each token, where they differ; else empty."""
    reference_logprobs: list[float] = field(default_factory=list)
    """Of each token, by the KL divergence's reference model; empty without one."""
    teacher_logprobs: list[float] = field(default_factory=list)
    """Of each token, by the teacher; empty without one."""
    cut_logprobs: list[float] = field(default_factory=list)
    """The generator's, of each among the tokens that top_k, top_p and min_p left; empty where nothing was cut."""
    values: list[float] = field(default_factory=list)
    """The value function's estimate of the state that each token was sampled in; empty without one."""
    returns: list[float] = field(default_factory=list)
    """What each of `values` is to become."""
    dropped: str = ""
    """Why it is not trained on; empty: it is."""
    failure: str = ""
    """Why its reward failed: `timeout`, `raised` …; empty where it did not."""
    counts: bool = True
    """Whether its reward counts: false where it failed and failures are dropped."""

    def advantages_of_tokens(self) -> list[float]:
        """One advantage per sampled token."""
        return self.token_advantages or [self.advantage] * len(self.token_ids)


def write_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """One JSON object a line, under a temporary name until all are written."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        for rollout in rollouts:
            line: dict[str, Any] = {
                "prompt": rollout.example.prompt,
                "completion": rollout.completion,
                "answer": rollout.example.answer,
                "rewards": rollout.rewards,
                "reward": rollout.reward,
                "advantage": rollout.advantage,
                **({"token_advantages": rollout.token_advantages} if rollout.token_advantages else {}),
                **({"values": rollout.values} if rollout.values else {}),
                **({"dropped": rollout.dropped} if rollout.dropped else {}),
                "finish_reason": rollout.finish_reason,
                "group": rollout.group,
                "version": rollout.version,
                "prompt_ids": rollout.prompt_ids,
                "token_ids": rollout.token_ids,
                "log_probs": rollout.logprobs,
                **({"cut_log_probs": rollout.cut_logprobs} if rollout.cut_logprobs else {}),
            }
            if rollout.failure:
                line["failure"] = rollout.failure
            file.write(json.dumps(line) + "\n")
    partial.replace(path)
