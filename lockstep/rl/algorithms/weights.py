"""Each token's weight in a step's loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def token_weights(
    lengths: Sequence[int],
    average: Literal["token", "sequence", "budget"],
    budget: int = 0,
    masked: Sequence[bool] = (),
) -> list[Tensor]:
    """Each completion's token weights; over all completions of a step they add up to 1, except with `budget`.

    masked: for each completion whether its tokens weigh 0; empty: none. They do not count among the tokens that `token`
    averages over, but among the completions, as in TRL.

    `token`: every token weighs the same (DAPO, arXiv 2503.14476, equation 12). `sequence`: every completion does,
    whatever its length (GRPO, arXiv 2402.03300, equation 3); empty ones do not count. `budget`: every token weighs
    1 / (completions · `budget`), so a token's weight depends neither on its completion's length nor on the others'
    (Dr. GRPO, arXiv 2503.20783, section 3.2).
    """
    masked = masked or [False] * len(lengths)
    sequences = sum(n > 0 for n in lengths)
    total = sum(n for n, is_masked in zip(lengths, masked) if not is_masked)

    def weight(length: int) -> float:
        if average == "token":
            return 1.0 / max(total, 1)
        return 1.0 / max(sequences * (budget if average == "budget" else length), 1)

    return [torch.full((n,), 0.0 if is_masked else weight(n)) for n, is_masked in zip(lengths, masked)]
