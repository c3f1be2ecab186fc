"""The factor of logits at a temperature."""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor


def inverse_temperature(temperature: Float32[Tensor, "rows"]) -> Float32[Tensor, "rows"]:
    """1 over each row's temperature, in float32; 1 for temperature 0, which means greedy.

    Trainer and generator both call it, since 1/t rounded from float64 differs for every third temperature.
    """
    return torch.where(temperature == 0, 1.0, 1.0 / temperature)
