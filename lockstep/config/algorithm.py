"""The parts of a reinforcement algorithm, and the predefined algorithms by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lockstep.config.runs import RLConfig

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce++",
    "reinforce++-baseline",
    "rejection",
    "distillation",
    "ppo",
]
ADVANTAGES = ("group", "leave_one_out", "batch", "group_batch", "best", "teacher", "gae")
LOSSES = ("clip", "clip_sequence", "clip_weight", "reinforce")
Average = Literal["token", "sequence", "budget"]
KLEstimator = Literal["k1", "k2", "k3"]
KLIn = Literal["loss", "reward"]
OffPolicy = Literal["none", "truncate", "mask"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class Algorithm:
    """The parameters of a reinforcement algorithm; the settings of the same names in `RLConfig` describe them.

    The defaults are GRPO's. Losses and advantages depend on no other settings of a run.
    """

    advantage: str = "group"
    """One of ADVANTAGES, or a function in a file, FILE.py:NAME."""
    normalize_advantages: bool = True
    loss: str = "clip"
    """One of LOSSES, or a function in a file, FILE.py:NAME."""
    loss_average: Average = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    kl_in: KLIn = "loss"
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    extra_rounds: int = 0
    overlong_share: float = 0.0
    off_policy: OffPolicy = "none"
    off_policy_level: Level = "token"
    off_policy_low: float = 0.5
    off_policy_high: float = 2.0
    gae_gamma: float = 1.0
    gae_lambda: float = 0.95
    value_coefficient: float = 0.1
    value_clip: float = 0.2


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(),
    "dr_grpo": Algorithm(normalize_advantages=False, loss_average="budget"),
    "dapo": Algorithm(clip_high=0.28, extra_rounds=3, overlong_share=0.2),
    "gspo": Algorithm(loss="clip_sequence", loss_average="sequence", clip_low=3e-4, clip_high=4e-4),
    "cispo": Algorithm(loss="clip_weight", clip_low=1.0, clip_high=4.0),
    "rloo": Algorithm(
        advantage="leave_one_out",
        normalize_advantages=False,
        loss="reinforce",
        loss_average="budget",
        kl_in="reward",
        kl_estimator="k1",
    ),
    "reinforce++": Algorithm(advantage="batch", kl_in="reward", kl_estimator="k1"),
    "reinforce++-baseline": Algorithm(advantage="group_batch", kl_estimator="k2"),
    "rejection": Algorithm(advantage="best", normalize_advantages=False, loss="reinforce"),
    "distillation": Algorithm(advantage="teacher", normalize_advantages=False, loss="reinforce"),
    "ppo": Algorithm(advantage="gae", kl_in="reward", kl_estimator="k1"),
}
"""By their names in `RLConfig.algorithm`; docs/algorithms.md lists the papers."""


def with_algorithm(config: RLConfig, before: RLConfig, given: Collection[str]) -> RLConfig:
    """`config`, with the algorithm's settings reset to their defaults if it names a different algorithm than `before`.

    A recorded config.toml contains all of them, and they would override the new algorithm's. given: names of settings
    that the user has set, which are not reset.
    """
    if config.algorithm == before.algorithm:
        return config
    names = {field.name for field in dataclasses.fields(Algorithm)} | {"value_learning_rate", "value_detached"}
    names -= set(given)
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(config) if f.name in names}
    return dataclasses.replace(config, **defaults)


def algorithm_of(config: RLConfig) -> Algorithm:
    """The run's algorithm: that of `config.algorithm`, overridden by the settings that are set in `config`."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(Algorithm)}
    overrides = {name: value for name, value in values.items() if value is not None and value != ""}
    return dataclasses.replace(ALGORITHMS[config.algorithm], **overrides)
