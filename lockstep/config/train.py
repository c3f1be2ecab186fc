"""The optimizer, its schedule and the shape of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bfloat16", "float32"]


@dataclass
class TrainConfig:
    """Optimizer, schedule and batch shape."""

    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warm-up."""
    final_learning_rate_ratio: float = 0.1
    """Learning rate at the last step, relative to the peak (linear and cosine)."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    epsilon: float = 1e-8
    """AdamW's denominator offset."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; vectors are never decayed."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""
    tokens_per_microbatch: int = 8192
    """Tokens of one packed forward and backward pass; a step accumulates as many as it needs."""
