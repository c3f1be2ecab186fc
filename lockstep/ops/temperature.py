"""What logits are multiplied by at a temperature."""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor


def inverse_temperature(temperature: Float32[Tensor, "rows"]) -> Float32[Tensor, "rows"]:
    """1 over each row's temperature, in float32; 1 where that is 0, which stands for greedy.

    Trainer and generator both call it, for 1/t rounded from float64 is another number at every third temperature.
    """
    return torch.where(temperature == 0, 1.0, 1.0 / temperature)
