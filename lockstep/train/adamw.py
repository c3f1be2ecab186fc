"""AdamW (arXiv 1711.05101) over plain tensors, with moments in float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep import ops
from lockstep.config import TrainConfig
from lockstep.model.shard import local_values
from lockstep.ops import native

State = dict[str, Tensor]
"""An optimizer's state of one parameter."""


def adamw_state(master: Tensor, dtype: torch.dtype) -> State:
    """The state before the first step: both moments zero. The number of steps is read on the CPU."""
    device = "cpu" if master.device.type == "cuda" else master.device
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(master, dtype=dtype, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(master, dtype=dtype, requires_grad=False),
    }


@torch.no_grad()
def round_into(weights: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Rounds masters into the model's weights, in place, so that everything that reads them sees the new values.
    Float32 weights are their own masters."""
    for weight, master in zip(weights, masters):
        if weight is not master:
            weight.copy_(master)


@torch.no_grad()
def scaled_gradients(grads: Sequence[Tensor], scale: float) -> list[Tensor]:
    """All gradients in float32, times `scale`; float32 gradients are scaled in place."""
    grads = [grad.float() for grad in grads]
    if scale != 1.0:
        torch._foreach_mul_([local_values(grad) for grad in grads], scale)
    return grads


@torch.no_grad()
def adamw_update(
    masters: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    learning_rate: float,
    weight_decay: float,
    config: TrainConfig,
    scale: float = 1.0,
) -> None:
    """Updates every master in place, with its gradient times `scale`, and rounds it into the model's weight; if it is
    sharded, only this rank's shard, since AdamW is elementwise.
    """
    if native.is_pretending():
        return
    for master, weight, grad, state in zip(masters, weights, grads, states):
        state["step"] += 1
        factors = ops.adamw_factors(
            int(state["step"]), learning_rate, weight_decay, config.beta1, config.beta2, config.epsilon
        )
        ops.adamw_step(
            local_values(master),
            local_values(grad),
            local_values(state["exp_avg"]),
            local_values(state["exp_avg_sq"]),
            factors,
            scale,
            None if weight is master else local_values(weight),
        )
