"""The penalty for completions that come close to the length limit."""

from __future__ import annotations


def overlong_penalty(length: int, limit: int, share: float) -> float:
    """What is added to a completion's reward: 0 while it leaves the last `share` of `limit` tokens unused, then falling
    linearly to -1 at the limit.

    Soft overlong punishment, DAPO, arXiv 2503.14476, equation 13, with L_max = `limit` and L_cache = `share` · `limit`.
    """
    buffer = share * limit
    if length <= limit - buffer:
        return 0.0
    return max((limit - buffer - length) / buffer, -1.0)
