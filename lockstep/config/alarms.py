"""When a reinforcement run says that something goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lockstep.config.bounds import Above, AtLeast, AtMost

ALARMS = {
    "no_signal": "all completions of each prompt had the same reward, so nothing was learnt: the task is too hard or "
    "too easy, or its reward is wrong; rollouts/ shows the completions",
    "reward_gap": "the reward of training rises while that of validation falls: the policy learns the training "
    "prompts by heart, or exploits what the reward does not check; compare completions of both in rollouts/, add "
    "prompts, raise kl_coefficient, or go back to the checkpoint of the best validation",
    "length": "completions grow longer and longer: the reward pays for length, or the policy has lost its way to the "
    "end of a text; read the longest in rollouts/, see rollout/truncated, and set overlong_share",
    "entropy": "the entropy of the policy has collapsed: it says the same whatever is drawn, so groups have little "
    "left to compare; see diversity/distinct, raise clip_high or entropy_coefficient, or lower train.learning_rate",
    "ratio": "an importance ratio is beyond its bounds: the policy moves further in a step than its samples can tell; "
    "lower train.learning_rate or inner_steps, or take max_grad_norm down",
    "kl": "the policy is far from its reference: it may have left what the reference knows of language; read "
    "completions in rollouts/, raise kl_coefficient, or lower train.learning_rate",
    "dead_experts": "an expert of a mixture gets no tokens any more, so its weights are of no use: its router prefers "
    "others, which learn more and are preferred the more; raise train.router_auxiliary, or train.router_bias_rate "
    "where the model has biases for it",
}
"""Every alarm's name, its cause and what to look at."""


@dataclass
class AlarmConfig:
    """Limits beyond which a run warns of a known way to fail, once per occurrence, and may end."""

    window: Annotated[int, Above(0)] = 10
    """Steps whose mean is looked at, and compared with that of as many at the beginning."""
    no_signal: Annotated[int, AtLeast(0)] = 10
    """Steps in a row in which all completions of each prompt had the same reward; 0: no such alarm."""
    reward_gap: Annotated[float, AtLeast(0)] = 0.5
    """Since the best validation the reward of training has risen and that of validation fallen, together by so many
    standard deviations of a step's rewards; 0: no such alarm."""
    length: Annotated[float, AtLeast(0)] = 2.0
    """Mean length of completions, as a multiple of that at the beginning; 0: no such alarm."""
    entropy: Annotated[float, AtLeast(0), AtMost(1)] = 0.1
    """Entropy of the policy, as a share of that at the beginning, below which it has collapsed; 0: no such alarm."""
    ratio: Annotated[float, AtLeast(0)] = 10.0
    """Largest importance ratio of a step, and the inverse of the smallest; 0: no such alarm."""
    kl: Annotated[float, AtLeast(0)] = 1.0
    """KL divergence to the reference model, in nats per token; 0: no such alarm."""
    stop: tuple[str, ...] = ()
    """Alarms that end the run: no_signal, reward_gap, length, entropy, ratio, kl."""
