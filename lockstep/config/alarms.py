"""When a reinforcement run warns that something is going wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lockstep.config.bounds import Above, AtLeast, AtMost

ALARMS = {
    "no_signal": "all completions of each prompt had the same reward, so nothing was learned: the task is too hard or "
    "too easy, or its reward is wrong; rollouts/ shows the completions",
    "reward_gap": "the training reward rises while the validation reward falls: the policy memorizes the training "
    "prompts, or exploits what the reward does not check; compare completions of both in rollouts/, add "
    "prompts, raise kl_coefficient, or go back to the checkpoint with the best validation",
    "length": "completions keep getting longer: the reward pays for length, or the policy no longer ends its "
    "texts; read the longest in rollouts/, see rollout/truncated, and set overlong_share",
    "entropy": "the policy's entropy has collapsed: its samples are nearly the same every time, so groups have little "
    "left to compare; see diversity/distinct, raise clip_high or entropy_coefficient, or lower train.learning_rate",
    "ratio": "an importance ratio is out of bounds: the policy moves further in a step than its samples support; "
    "lower train.learning_rate, updates_per_batch or max_grad_norm",
    "kl": "the policy is far from its reference: it may have unlearned what the reference knows about language; read "
    "completions in rollouts/, raise kl_coefficient, or lower train.learning_rate",
    "dead_experts": "an expert of a mixture no longer gets any tokens, so its weights are useless: its router prefers "
    "other experts, which learn more and are then preferred even more; raise train.router_auxiliary, or "
    "train.router_bias_rate if the model has router biases",
}
"""Every alarm by name: its cause and what to check."""


@dataclass
class AlarmConfig:
    """Limits beyond which a run warns of a known failure mode, once per occurrence, and can be stopped."""

    window: Annotated[int, Above(0)] = 10
    """Number of steps to average over; compared with the average of as many steps at the beginning of the run."""
    no_signal: Annotated[int, AtLeast(0)] = 10
    """Consecutive steps in which all completions of each prompt had the same reward; 0: off."""
    reward_gap: Annotated[float, AtLeast(0)] = 0.5
    """Rise of the training reward plus fall of the validation reward since the best validation, in standard deviations
    of a step's rewards; 0: off."""
    length: Annotated[float, AtLeast(0)] = 2.0
    """Mean completion length, as a multiple of that at the beginning; 0: off."""
    entropy: Annotated[float, AtLeast(0), AtMost(1)] = 0.1
    """Policy entropy, as a fraction of that at the beginning, below which it counts as collapsed; 0: off."""
    ratio: Annotated[float, AtLeast(0)] = 10.0
    """Largest importance ratio of a step, and the inverse of the smallest; 0: off."""
    kl: Annotated[float, AtLeast(0)] = 1.0
    """KL divergence to the reference model, in nats per token; 0: off."""
    stop: tuple[str, ...] = ()
    """Alarms that end the run: no_signal, reward_gap, length, entropy, ratio, kl."""
