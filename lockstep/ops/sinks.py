"""The gradient of attention sinks: a score per head without a key, which reduces the weights of the keys."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import native


def sink_gradient(
    grad_out: Float[Tensor, "rows heads head_dim"],
    out: Float[Tensor, "rows heads head_dim"],
    log_sums: Float[Tensor, "rows heads"],
    sinks: Float[Tensor, "heads"],
    tokens: int,
) -> Float[Tensor, "heads"]:
    """The gradient of `sinks`, in their dtype, given the attended values and log-sums that include them.

    A sink's weight is w = e^(sink - log-sum), and the derivative of the output with respect to it is -w times the
    output. Rows from `tokens` on are padding, whose log-sums are undefined.
    """
    grad_out, out, log_sums = grad_out[:tokens], out[:tokens], log_sums[:tokens]
    if native.usable(out):
        grad = torch.zeros(sinks.shape, dtype=torch.float32)
        native.call(
            "sink_gradient", out.dtype, grad_out.contiguous(), out.contiguous(), log_sums.contiguous(),
            sinks.float().contiguous(), grad, *out.shape,
        )  # fmt: skip
        return grad.to(sinks.dtype)
    deltas = (grad_out.float() * out.float()).sum(-1)
    return -(torch.exp(sinks.float() - log_sums) * deltas).sum(0).to(sinks.dtype)
