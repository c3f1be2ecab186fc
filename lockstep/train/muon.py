"""Muon: orthogonalized momentum (https://kellerjordan.github.io/posts/muon; arXiv 2502.16982)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep import ops
from lockstep.config import TrainConfig
from lockstep.model import resolve_dtype
from lockstep.model.shard import local_values
from lockstep.train.adamw import State, round_into, scaled_gradients
from lockstep.train.whole_matrices import map_whole_matrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2
"""RMS of an update's elements, about that of AdamW, so that one learning rate and weight decay fit both."""


def muon_state(master: Tensor, dtype: torch.dtype) -> State:
    """The state before the first step: zero momentum."""
    return {"momentum": torch.zeros_like(master, dtype=dtype, requires_grad=False)}


@torch.no_grad()
def muon_update(
    masters: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    learning_rate: float,
    weight_decay: float,
    config: TrainConfig,
    scale: float = 1.0,
) -> None:
    """Updates every master in place, with its gradient times `scale`: a matrix, or the stacked matrices of experts,
    each separately. Rounds it into the model's weight.

    If they are sharded, each rank orthogonalizes its share of them as whole matrices.
    """
    grads = scaled_gradients(grads, scale)
    beta, dtype = config.muon_momentum, resolve_dtype(config.muon_dtype)
    updates = []
    for grad, state in zip(grads, states):
        local, momentum = local_values(grad), local_values(state["momentum"])
        wide = _between(momentum.float(), local, 1 - beta, dtype)
        momentum.copy_(wide)
        updates.append(_between(local, wide, beta, dtype).to(dtype))
    for master, update in zip(masters, map_whole_matrices(orthogonalize, updates, masters)):
        local = local_values(master)
        local.mul_(1 - learning_rate * weight_decay)
        local.sub_(update.to(local.dtype) * (learning_rate * RMS * math.sqrt(max(master.shape[-2:]))))
    round_into(weights, masters)


def _between(start: Tensor, end: Tensor, share: float, dtype: torch.dtype) -> Tensor:
    """Interpolates from `start` to `end`; in float32 one operation at a time, which is the same on every processor."""
    if dtype == torch.float32:
        return start * (1 - share) + end * share
    return start.lerp(end, share)


def orthogonalize(matrix: Float[Tensor, "*experts rows columns"]) -> Float[Tensor, "*experts rows columns"]:
    """Approximately U·Vᵀ of the singular value decomposition, by five quintic Newton–Schulz iterations.

    Singular values end up between about 0.7 and 1.2; the iteration is stable in bfloat16. Stacked matrices are handled
    separately.
    """
    if matrix.ndim > 2:
        return _each(matrix)
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return _portable(x, wide)
    x = x / x.norm().clamp(min=1e-7)  # so that no singular value is above 1
    for _ in range(ITERATIONS):
        gram = x @ x.T
        # Fused additions round once, which matters in bfloat16.
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def _each(matrices: Float[Tensor, "experts rows columns"]) -> Float[Tensor, "experts rows columns"]:
    """All at once on a GPU, since their products are small; one after the other on a CPU, bitwise as each alone."""
    if matrices.device.type == "cpu":
        out = torch.empty_like(matrices)
        for index, matrix in enumerate(matrices):
            out[index] = orthogonalize(matrix)
        return out
    return _together(matrices)


def _together(matrices: Float[Tensor, "experts rows columns"]) -> Float[Tensor, "experts rows columns"]:
    a, b, c = COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def _portable(x: Tensor, wide: bool) -> Tensor:
    """The same in float32 on a CPU, with `ops.linear` for the products: the same bits on every processor."""
    a, b, c = COEFFICIENTS
    x = x / math.sqrt(max(float(ops.sum_of_squares(x.contiguous())), 1e-14))
    for _ in range(ITERATIONS):
        gram = ops.linear(x, x)
        x = x * a + ops.linear(gram * b + ops.linear(gram, gram) * c, x.T)
    return x if wide else x.T
