"""What logits are multiplied by at a temperature."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_temperature(temperature: float | Tensor) -> Tensor:
    """1 over the float32 of `temperature`, in float32; 1 where that is 0, which stands for greedy.

    Trainer and generator both call it, for 1/t rounded from float64 is another number at every third temperature.
    """
    narrow = torch.as_tensor(temperature, dtype=torch.float32)
    return torch.where(narrow == 0, 1.0, 1.0 / narrow)
