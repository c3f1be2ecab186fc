"""The charge for completions that come close to the limit."""

from __future__ import annotations


def overlong_penalty(length: int, limit: int, share: float) -> float:
    """What is added to a completion's reward: 0 as long as it leaves the last `share` of `limit` tokens free, falling
    linearly from there to -1 at the limit.

    Soft overlong punishment, DAPO, arXiv 2503.14476, equation 13, with L_max = `limit` and L_cache = `share` · `limit`.
    """
    buffer = share * limit
    if length <= limit - buffer:
        return 0.0
    return max((limit - buffer - length) / buffer, -1.0)
