"""Each token's weight in a step's loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def token_weights(
    lengths: Sequence[int], average: Literal["token", "sequence", "budget"], budget: int = 0
) -> list[Tensor]:
    """Each completion's token weights; over all completions of a step they add up to 1, except with `budget`.

    `token`: every token weighs the same (DAPO, arXiv 2503.14476, equation 12). `sequence`: every completion does,
    whatever its length (GRPO, arXiv 2402.03300, equation 3); empty ones do not count. `budget`: every token weighs
    1 / (completions · `budget`), so a token's weight depends neither on its completion's length nor on the others'
    (Dr. GRPO, arXiv 2503.20783, section 3.2).
    """
    sequences = sum(n > 0 for n in lengths)
    if average == "token":
        total = sum(lengths)
        return [torch.full((n,), 1.0 / max(total, 1)) for n in lengths]
    if average == "budget":
        return [torch.full((n,), 1.0 / max(sequences * budget, 1)) for n in lengths]
    return [torch.full((n,), 1.0 / max(n * sequences, 1)) for n in lengths]
