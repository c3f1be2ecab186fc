"""The best of several samples (`best_of`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.generate.server.reply import Piece


def best_of(choices: Sequence[Piece], drawn: int, n: int) -> list[Piece]:
    """Of every `drawn` finished choices of a prompt, the `n` with the highest mean log-probability per token, best
    first, numbered anew."""
    best = []
    for start in range(0, len(choices), drawn):
        ordered = sorted(choices[start : start + drawn], key=_mean_logprob, reverse=True)
        for rank, choice in enumerate(ordered[:n]):
            choice.index = start // drawn * n + rank
            best.append(choice)
    return best


def _mean_logprob(choice: Piece) -> float:
    return math.fsum(event.logprob for event in choice.events) / len(choice.events)
