"""Sampled completions, the scores they are given, and their file in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress, groupby
from pathlib import Path
from typing import Any

from lockstep.errors import RunStopped
from lockstep.generate.routes import shortened
from lockstep.rl.environments.protocol import Example
from lockstep.rl.grading.calling import Outcome

OVERLONG, REWARD_MODEL = "overlong", "reward_model"
"""Names of rewards that are not the environment's."""


@dataclass
class Conversation:
    """The result of a conversation, from its environment's side."""

    messages: list[dict[str, Any]]
    outcome: Outcome | None = None
    """Rewards that `converse` returned, or why it failed; None: neither."""
    over: bool = False
    """Whether it ended at its limit of turns or tokens."""
    turns: int = 0
    """Number of the model's replies."""
    tool_calls: int = 0
    """In all replies together."""
    tool_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that each tool took, by name."""
    environment_seconds: float = 0.0
    """Total of the environment's turns, including tools."""


@dataclass
class Scores:
    """What graders and scorers add to a rollout, each filling its columns. Those per token are empty until then."""

    rewards: dict[str, float] = field(default_factory=dict)
    """By name."""
    reward: float = 0.0
    """Weighted total."""
    failure: str = ""
    """Why the reward failed: `timeout`, `raised` …; empty if it did not."""
    counts: bool = True
    """Whether the reward counts: False if it failed and failures are dropped."""
    dropped: str = ""
    """Why the rollout is not trained on; empty if it is."""
    advantage: float = 0.0
    """Of the completion; the mean over its tokens if `token_advantages` are set."""
    token_advantages: list[float] = field(default_factory=list)
    """One per token if they differ; else empty."""
    reference_logprobs: list[float] = field(default_factory=list)
    """One per token, by the KL divergence's reference model; empty without one."""
    teacher_logprobs: list[float] = field(default_factory=list)
    """One per token, by the teacher; empty without one."""
    values: list[float] = field(default_factory=list)
    """The value function's estimate of the state in which each token was sampled; empty without one."""
    returns: list[float] = field(default_factory=list)
    """The targets of `values`."""
    trainer_logprobs: list[float] = field(default_factory=list)
    """The trainer's, one per token, if any differs from the generator's; else empty."""
    entropies: list[float] = field(default_factory=list)
    """Of the distribution that each token was drawn from, in nats; empty if the rollout is not trained on."""

    def environment_rewards(self) -> dict[str, float]:
        """The rewards that the environment gave."""
        return {name: value for name, value in self.rewards.items() if name not in (OVERLONG, REWARD_MODEL)}


@dataclass(frozen=True)
class Rollout:
    """One sampled completion of an example; or a row of a conversation, with the tokens of several turns.

    What was sampled does not change; what is computed from it is in `scores`.
    """

    example: Example
    group: int
    """Shared by the rollouts of one prompt."""
    prompt_ids: list[int]
    token_ids: list[int]
    """Everything after the first prompt."""
    logprobs: list[float]
    """The generator's, for each sampled token, over the whole vocabulary."""
    finish_reason: str
    """Of the last reply."""
    completion: str
    """The last reply's text."""
    version: int
    """Of the weights that sampled it; the oldest if there are several."""
    truncated_logprobs: list[float] = field(default_factory=list)
    """The generator's, one per token, within the tokens left by top_k, top_p and min_p; empty if nothing was cut."""
    sampled: list[bool] = field(default_factory=list)
    """For each of `token_ids`, whether the model sampled it or the environment added it; empty: all are the model's."""
    episode: int | None = None
    """Index within its group, shared by the rows of a conversation whose history was rewritten. None: not shared."""
    versions: list[int] = field(default_factory=list)
    """Weights version of each sampled token, if they are not all `version`; else empty."""
    routes: list[str] = field(default_factory=list)
    """For each sampled token, the generator's experts in the format of `generate.routes`; empty without experts."""
    conversation: Conversation | None = None
    """The conversation of which this is a row; None: a prompt and its completion."""
    scores: Scores = field(default_factory=Scores)

    def advantages_of_tokens(self) -> list[float]:
        """One advantage per sampled token."""
        return self.scores.token_advantages or [self.scores.advantage] * self.num_sampled

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(self.sampled) if self.sampled else len(self.token_ids)

    def sampled_ids(self) -> list[int]:
        """The tokens that the model sampled."""
        return list(compress(self.token_ids, self.sampled)) if self.sampled else self.token_ids

    def targets(self) -> list[int]:
        """Positions of the sampled tokens in prompt_ids + token_ids."""
        sampled = self.sampled or [True] * len(self.token_ids)
        return [len(self.prompt_ids) + index for index, is_sampled in enumerate(sampled) if is_sampled]

    def staleness(self, version: int) -> list[int]:
        """For each sampled token, how many versions behind `version` its weights were."""
        return [version - older for older in self.versions or [self.version] * self.num_sampled]

    def longest_reply(self) -> int:
        """Length of the longest run of sampled tokens."""
        if not self.sampled:
            return len(self.token_ids)
        return max((sum(1 for _ in run) for is_sampled, run in groupby(self.sampled) if is_sampled), default=0)


def episodes_of(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Consecutive rollouts by episode: the rows of a conversation, or one completion."""
    numbered = enumerate(rollouts)
    runs = groupby(numbered, lambda each: (each[1].group, each[1].episode, each[0] if each[1].episode is None else -1))
    return [[rollout for _, rollout in run] for _, run in runs]


def of_versions(versions: Sequence[int], current: int) -> dict[str, Any]:
    """`version` and `versions` of a rollout; versions: one per token, empty if all are `current`."""
    version = min(versions, default=current)
    return {"version": version, "versions": [] if set(versions) <= {version} else list(versions)}


def write_rollouts(path: Path, rollouts: Sequence[Rollout], whole_routes: bool = False) -> None:
    """Writes one JSON object per line, under a temporary name until complete; routes as digests unless `whole_routes`.

    Raises RunStopped if they cannot be written to disk, and leaves nothing half-written behind.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(exist_ok=True)
        with partial.open("w") as file:
            for rollout in rollouts:
                file.write(json.dumps(_line(rollout, whole_routes)) + "\n")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise RunStopped(
            f"{path}: the rollouts cannot be written ({error.strerror}), and the run ends here; its metrics up to this "
            "step are complete. Free some space, then --resume continues from the newest checkpoint",
            exit_code=1,
        ) from error


def _line(rollout: Rollout, whole_routes: bool) -> dict[str, Any]:
    """Empty fields are left out, except for those that every rollout has."""
    scores = rollout.scores
    sometimes = {
        "token_advantages": scores.token_advantages,
        "versions": rollout.versions,
        "routes": rollout.routes if whole_routes else [shortened(route) for route in rollout.routes],
        "values": scores.values,
        "truncated_logprobs": rollout.truncated_logprobs,
        "dropped": scores.dropped,
        "failure": scores.failure,
        "reference_log_probs": scores.reference_logprobs,
        "teacher_log_probs": scores.teacher_logprobs,
        "trainer_log_probs": scores.trainer_logprobs,
        # For inspection only: four decimals are enough, and half as long.
        "entropies": [round(entropy, 4) for entropy in scores.entropies],
    }
    return {
        "prompt": rollout.example.text,
        "completion": rollout.completion,
        "answer": rollout.example.answer,
        "rewards": scores.rewards,
        "reward": scores.reward,
        "advantage": scores.advantage,
        "finish_reason": rollout.finish_reason,
        "group": rollout.group,
        "version": rollout.version,
        "prompt_ids": rollout.prompt_ids,
        "token_ids": rollout.token_ids,
        "log_probs": rollout.logprobs,
        **{name: value for name, value in sometimes.items() if value},
        **(_conversation(rollout, rollout.conversation) if rollout.conversation else {}),
    }


def _conversation(rollout: Rollout, conversation: Conversation) -> dict[str, Any]:
    return {
        "episode": rollout.episode,
        "sampled": [int(is_sampled) for is_sampled in rollout.sampled],
        "turns": conversation.turns,
        "messages": conversation.messages,
    }
