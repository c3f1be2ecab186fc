"""Per-token advantages from a value function's estimates, and the targets that it learns from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.rl.algorithms.losses import Loss


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


def value_losses(
    values: Float[Tensor, "tokens"],
    old_values: Float[Tensor, "tokens"],
    returns: Float[Tensor, "tokens"],
    clip: float,
) -> Loss:
    """½ max((V − R)², (V_clipped − R)²) with V_clipped = V_old + min(max(V − V_old, −clip), clip); ½ (V − R)² for 0.

    The value loss of PPO (arXiv 1707.06347, equation 9) with the clipping of its authors' implementation: as for the
    policy, there is no gradient where a value has already moved further than `clip` from the one before the step and is
    closer to R than the bound. Exactly on the bound, or exactly as far from R, it has the whole gradient.
    """
    plain = (values - returns).square()
    if clip == 0:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    moved = (values - old_values).detach()
    clipped = (old_values + moved.clamp(-clip, clip) - returns).square()
    is_clipped = (moved.abs() > clip) & (clipped > plain)
    return 0.5 * torch.where(is_clipped, clipped, plain), is_clipped


def explained_variance(values: Sequence[float], returns: Sequence[float]) -> float:
    """1 − Var(R − V) / Var(R): 1 if the values predict the returns, 0 if they are no better than a constant.

    Sums are exact, so their order does not matter. 0 if all returns are equal.
    """
    spread = _variance(returns)
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    return 1 - _variance(errors) / spread if spread > 0 else 0.0


def _variance(numbers: Sequence[float]) -> float:
    mean = math.fsum(numbers) / max(len(numbers), 1)
    return math.fsum((x - mean) * (x - mean) for x in numbers) / max(len(numbers), 1)
