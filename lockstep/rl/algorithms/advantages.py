"""How much better a completion, or one of its tokens, is than its baseline; and value functions' targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

EPSILON = 1e-4
"""Added to a group's standard deviation."""
LEAST_DEVIATION = 1e-4
"""Lower bound for the standard deviation over a step's tokens."""


def group_advantages(
    rewards: Float[Tensor, "prompts samples"], normalize: bool = True
) -> Float[Tensor, "prompts samples"]:
    """Rewards minus their group's mean, divided by the group's standard deviation if `normalize` is set.

    The deviation is the population's, √(Σ(r − mean)² / n), plus 1e-4. TRL uses the sample's, with n − 1: its
    advantages are √((n − 1) / n) times these, 0.94 in groups of 8.

    With the division: GRPO (arXiv 2402.03300, section 4.1.2). Without: Dr. GRPO (arXiv 2503.20783, section 3.2), which
    does not upweight groups of nearly equal rewards. A group of equal rewards gets exactly 0.
    """
    return _of_each_group(rewards, lambda group: _relative(group, normalize))


def leave_one_out_advantages(rewards: Float[Tensor, "prompts samples"]) -> Float[Tensor, "prompts samples"]:
    """Each reward minus the mean of the others in its group (RLOO, arXiv 2402.14740, section 2.2).

    A group of equal rewards gets exactly 0, and so does a group of one.
    """
    return _of_each_group(rewards, lambda group: [len(group) / max(len(group) - 1, 1) * a for a in _relative(group)])


def best_of_group(rewards: Float[Tensor, "prompts samples"]) -> Float[Tensor, "prompts samples"]:
    """1 for the completions with the highest reward of their group, else 0 (RAFT, arXiv 2304.06767, algorithm 1).

    If several are best, all get 1, as correct ones do in rejection-sampling fine-tuning (arXiv 2308.01825). A group of
    equal rewards offers no choice and gets 0. Rewards that differ by a trillionth are equal: sums such as 0.1 + 0.2.
    """

    def best(group: list[float]) -> list[float]:
        are_best = [math.isclose(reward, max(group), rel_tol=1e-12, abs_tol=1e-12) for reward in group]
        return [float(is_best and not all(are_best)) for is_best in are_best]

    return _of_each_group(rewards, best)


def whitened(advantages: Sequence[Sequence[float]], normalize: bool = True) -> list[list[float]]:
    """Each token's advantage minus the mean over all tokens of the step, divided by their standard deviation.

    REINFORCE++, arXiv 2501.03262: its normalization over the global batch. The deviation is the population's, and at
    least 1e-4, as in OpenRLHF, so that rounding differences do not become advantages of 1; without `normalize` there is
    no division. If all are equal they become exactly 0.
    """
    everything = [a for completion in advantages for a in completion]
    if not everything or all(a == everything[0] for a in everything):
        return [[0.0] * len(completion) for completion in advantages]
    mean = math.fsum(everything) / len(everything)
    deviation = math.sqrt(math.fsum((a - mean) * (a - mean) for a in everything) / len(everything))
    scale = max(deviation, LEAST_DEVIATION) if normalize else 1.0
    return [[(a - mean) / scale for a in completion] for completion in advantages]


def rewards_to_go(reward: float, charges: Sequence[float]) -> list[float]:
    """For each token, the completion's reward minus the `charges` of that token and of those after it.

    REINFORCE++, arXiv 2501.03262: A_t = r − β Σ KL(i) over i ≥ t, where `charges` are β KL.
    """
    sums = list(accumulate(reversed(charges)))
    return [reward - charge for charge in reversed(sums)]


def distillation_advantages(log_probs: Sequence[float], teacher_log_probs: Sequence[float]) -> list[float]:
    """log p_teacher − log p of each token that the policy sampled: minus its k1 estimate of KL(policy ‖ teacher).

    With the loss −A log p this is the gradient of the reverse KL divergence of each next-token distribution, on the
    policy's own completions (on-policy distillation, arXiv 2306.13649, equation 3 with the reverse KL; the single-step
    part of MiniLLM's gradient, arXiv 2306.08543, section 2.2).
    """
    return [teacher - own for teacher, own in zip(teacher_log_probs, log_probs, strict=True)]


def generalized_advantages(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lambda_: float
) -> list[float]:
    """Σ (γλ)^l δ_{t+l} over l ≥ 0, with δ_t = r_t + γ V_{t+1} − V_t, of each token of one completion.

    Generalized advantage estimation, Schulman et al., arXiv 1506.02438, equations 11 and 16. `values[t]` is V of the
    state in which token t is sampled; after the last token there is no more reward, so V is 0 there, including for
    completions that reached their limit.
    """
    advantages: list[float] = []
    later = following = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * following - value + gamma * lambda_ * later
        following = value
        advantages.append(later)
    return advantages[::-1]


def value_returns(advantages: Sequence[float], values: Sequence[float]) -> list[float]:
    """A_t + V_t: the targets of the value function, with the same λ as the advantages (TD(λ))."""
    return [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def explained_variance(values: Sequence[float], returns: Sequence[float]) -> float:
    """1 − Var(R − V) / Var(R): 1 if the values predict the returns, 0 if they are no better than a constant.

    Sums are exact, so their order does not matter. 0 if all returns are equal.
    """
    spread = _variance(returns)
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    return 1 - _variance(errors) / spread if spread > 0 else 0.0


def overlong_penalty(length: int, limit: int, share: float) -> float:
    """What is added to a completion's reward: 0 while it leaves the last `share` of `limit` tokens unused, then falling
    linearly to -1 at the limit.

    Soft overlong punishment, DAPO, arXiv 2503.14476, equation 13, with L_max = `limit` and L_cache = `share` · `limit`.
    """
    buffer = share * limit
    if length <= limit - buffer:
        return 0.0
    return max((limit - buffer - length) / buffer, -1.0)


def _of_each_group(rewards: Tensor, advantages: Callable[[list[float]], list[float]]) -> Tensor:
    rows = [advantages(row) for row in rewards.tolist()]
    return torch.tensor(rows, dtype=rewards.dtype, device=rewards.device).reshape(rewards.shape)


def _relative(rewards: list[float], normalize: bool = False) -> list[float]:
    # The mean of a group of equal rewards may be rounded; its advantages are still 0.
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    # Exact sums, so that they do not depend on a library's order of summation.
    mean = math.fsum(rewards) / len(rewards)
    centered = [reward - mean for reward in rewards]
    if not normalize:
        return centered
    deviation = math.sqrt(math.fsum(c * c for c in centered) / len(rewards))
    return [c / (deviation + EPSILON) for c in centered]


def _variance(numbers: Sequence[float]) -> float:
    mean = math.fsum(numbers) / max(len(numbers), 1)
    return math.fsum((x - mean) * (x - mean) for x in numbers) / max(len(numbers), 1)
