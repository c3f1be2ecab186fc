"""A completion with everything that is known about it, and its line in the run's folder."""

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
from lockstep.rl.environment import Example
from lockstep.rl.rewards.calling import Outcome

OVERLONG, REWARD_MODEL = "overlong", "reward_model"
"""Rewards that are not the environment's, by their names."""


@dataclass
class Conversation:
    """What came of a conversation, from its environment's side."""

    messages: list[dict[str, Any]]
    outcome: Outcome | None = None
    """Rewards that `converse` returned, or why it failed; None: neither."""
    over: bool = False
    """Whether it ended at its limit of turns or of tokens."""
    turns: int = 0
    """Replies of the model."""
    tool_calls: int = 0
    """In all of them."""
    tool_seconds: dict[str, float] = field(default_factory=dict)
    """What each tool took, by its name."""
    environment_seconds: float = 0.0
    """Of the environment's turns, tools included."""


@dataclass
class Rollout:
    """One sampled completion of an example; or a row of a conversation, with the tokens of several turns."""

    example: Example
    group: int
    """Rollouts of one prompt share it."""
    prompt_ids: list[int]
    token_ids: list[int]
    """Everything after the first prompt."""
    logprobs: list[float]
    """The generator's, of each sampled token, over the whole vocabulary."""
    finish_reason: str
    """Of the last reply."""
    completion: str
    """The last reply's text."""
    version: int
    """Of the weights that sampled it; of the oldest where there are several."""
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
    trainer_logprobs: list[float] = field(default_factory=list)
    """The trainer's, of each token, where any of them differs from the generator's; else empty."""
    entropies: list[float] = field(default_factory=list)
    """Of the distribution that each token was drawn from, in nats; empty where it is not trained on."""
    place: int = -1
    """Of its prompt in the order of the whole run."""
    dropped: str = ""
    """Why it is not trained on; empty: it is."""
    failure: str = ""
    """Why its reward failed: `timeout`, `raised` …; empty where it did not."""
    counts: bool = True
    """Whether its reward counts: false where it failed and failures are dropped."""
    sampled: list[bool] = field(default_factory=list)
    """Of each of `token_ids`, whether the model sampled it or its environment said it; empty: all are the model's."""
    episode: int | None = None
    """Of its group: the rows of a conversation whose history was rewritten share it. None: one of its own."""
    versions: list[int] = field(default_factory=list)
    """Of the weights that each sampled token comes from, where they are not all `version`; else empty."""
    routes: list[str] = field(default_factory=list)
    """Of each sampled token, the generator's experts as `generate.routes` writes them; empty where there are none."""
    conversation: Conversation | None = None
    """Of which this is a row; None: a prompt and its completion."""

    def advantages_of_tokens(self) -> list[float]:
        """One advantage per sampled token."""
        return self.token_advantages or [self.advantage] * self.num_sampled

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return sum(self.sampled) if self.sampled else len(self.token_ids)

    def sampled_ids(self) -> list[int]:
        """The tokens that the model sampled."""
        return list(compress(self.token_ids, self.sampled)) if self.sampled else self.token_ids

    def targets(self) -> list[int]:
        """Where in prompt_ids + token_ids the sampled tokens stand."""
        sampled = self.sampled or [True] * len(self.token_ids)
        return [len(self.prompt_ids) + index for index, own in enumerate(sampled) if own]

    def staleness(self, version: int) -> list[int]:
        """How many versions behind `version` the weights were that each sampled token comes from."""
        return [version - own for own in self.versions or [self.version] * self.num_sampled]

    def own_rewards(self) -> dict[str, float]:
        """Those that the environment gave."""
        return {name: value for name, value in self.rewards.items() if name not in (OVERLONG, REWARD_MODEL)}

    def longest_reply(self) -> int:
        """Sampled tokens that stand together, at most."""
        if not self.sampled:
            return len(self.token_ids)
        return max((sum(1 for _ in run) for own, run in groupby(self.sampled) if own), default=0)


def episodes_of(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts that follow each other, by episode: the rows of a conversation, or one completion."""
    numbered = enumerate(rollouts)
    runs = groupby(numbered, lambda each: (each[1].group, each[1].episode, each[0] if each[1].episode is None else -1))
    return [[rollout for _, rollout in run] for _, run in runs]


def of_versions(versions: Sequence[int], current: int) -> dict[str, Any]:
    """`version` and `versions` of a rollout; versions: of each of its tokens, empty where all are `current`."""
    version = min(versions, default=current)
    return {"version": version, "versions": [] if set(versions) <= {version} else list(versions)}


def write_rollouts(path: Path, rollouts: Sequence[Rollout], whole_routes: bool = False) -> None:
    """One JSON object a line, under a temporary name until all are written; of routes digests, unless wanted whole.

    Raises RunStopped where the disk does not take them, and leaves nothing half-written behind.
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
            "step are whole. Free some space, then --resume continues from the newest checkpoint",
            exit_code=1,
        ) from error


def _line(rollout: Rollout, whole_routes: bool) -> dict[str, Any]:
    """What is empty is left out, but for what every rollout has."""
    sometimes = {
        "token_advantages": rollout.token_advantages,
        "versions": rollout.versions,
        "routes": rollout.routes if whole_routes else [shortened(route) for route in rollout.routes],
        "values": rollout.values,
        "cut_log_probs": rollout.cut_logprobs,
        "dropped": rollout.dropped,
        "failure": rollout.failure,
        "reference_log_probs": rollout.reference_logprobs,
        "teacher_log_probs": rollout.teacher_logprobs,
        "trainer_log_probs": rollout.trainer_logprobs,
        # To look at: four places are enough, and half as long.
        "entropies": [round(entropy, 4) for entropy in rollout.entropies],
    }
    return {
        "prompt": rollout.example.prompt,
        "completion": rollout.completion,
        "answer": rollout.example.answer,
        "rewards": rollout.rewards,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "finish_reason": rollout.finish_reason,
        "group": rollout.group,
        "version": rollout.version,
        "prompt_ids": rollout.prompt_ids,
        "token_ids": rollout.token_ids,
        "log_probs": rollout.logprobs,
        **{name: value for name, value in sometimes.items() if value},
        **(_conversation(rollout, rollout.conversation) if rollout.conversation else {}),
    }


def _conversation(rollout: Rollout, held: Conversation) -> dict[str, Any]:
    return {
        "episode": rollout.episode,
        "sampled": [int(own) for own in rollout.sampled],
        "turns": held.turns,
        "messages": held.messages,
    }
