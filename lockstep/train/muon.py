"""Muon: orthogonalized momentum (https://kellerjordan.github.io/posts/muon; arXiv 2502.16982)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from lockstep import ops
from lockstep.config import TrainConfig
from lockstep.model import resolve_dtype
from lockstep.model.shard import is_dtensor, local_values
from lockstep.train.adamw import State, round_into, scaled_gradients

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

Place = tuple[slice, ...]
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
    return orthogonalize_together(matrices)


def orthogonalize_together(matrices: Float[Tensor, "experts rows columns"]) -> Float[Tensor, "experts rows columns"]:
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


def map_whole_matrices(
    function: Callable[[Tensor], Tensor], parts: Sequence[Tensor], placed: Sequence[Tensor]
) -> list[Tensor]:
    """Applies `function` to each matrix; `parts` are this rank's parts of them; returns its parts of the results.

    `placed` says how each matrix is laid out: a DTensor with its shape and placements, or a plain tensor for a matrix
    that this process has completely. The ranks of a mesh take turns with the matrices, so no work is done twice; all
    must call this with the same matrices in the same order. `function` keeps the shape. It handles stacked matrices
    separately, so ranks that have complete ones process those themselves.
    """
    results: list[Tensor] = list(parts)
    sharded: dict[DeviceMesh, list[int]] = defaultdict(list)
    for index, tensor in enumerate(placed):
        if is_dtensor(tensor) and tensor.device_mesh.size() > 1:
            sharded[tensor.device_mesh].append(index)
        else:
            results[index] = function(parts[index])
    for mesh, indices in sharded.items():
        with unset_fake_temporarily():  # in a dry run: meshes need real numbers
            group = (mesh._flatten() if mesh.ndim > 1 else mesh).get_group()
        size = mesh.size()
        places_of = {i: _places(placed[i].shape, mesh, placed[i].placements, group) for i in indices}  # type: ignore[attr-defined]
        for index in [i for i in indices if _holds_matrices(placed[i].shape, places_of[i])]:
            results[index] = function(parts[index])
            indices.remove(index)
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            places = [places_of[i] for i in batch]
            new = _map_batch(function, [parts[i] for i in batch], [placed[i].shape for i in batch], places, group)
            for index, part in zip(batch, new):
                results[index] = part
    return results


def _map_batch(
    function: Callable[[Tensor], Tensor],
    parts: list[Tensor],
    shapes: list[torch.Size],
    places: list[list[Place]],
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """At most as many matrices as ranks: rank i computes matrix i. `places[i][r]` is rank r's part of it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # Of identical copies, the first is sent.
    sent = [part if places[i].index(places[i][rank]) == rank else part[:0] for i, part in enumerate(parts)]
    sent += [parts[0][:0]] * (size - len(parts))
    mine = places[rank] if rank < len(places) else []
    sizes = [_numel(place) if mine.index(place) == r else 0 for r, place in enumerate(mine)] or [0] * size
    received = _exchange([s.reshape(-1) for s in sent], sizes, group)
    answers = [parts[0].new_empty(0)] * size
    if mine:
        whole = parts[0].new_empty(shapes[rank])
        for place, piece in zip(mine, received):
            if piece.numel():
                whole[place] = piece.view(whole[place].shape)
        result = function(whole)
        answers = [result[place].reshape(-1) for place in mine]
    sizes = [part.numel() for part in parts] + [0] * (size - len(parts))
    returned = _exchange(answers, sizes, group)
    return [piece.view(part.shape) for piece, part in zip(returned, parts)]


def _exchange(sent: list[Tensor], sizes: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Sends each rank its tensor; returns what each rank sent here, `sizes` elements."""
    received = sent[0].new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat(sent), sizes, [s.numel() for s in sent], group=group)
    return list(received.split(sizes))


def _holds_matrices(shape: torch.Size, places: list[Place]) -> bool:
    """Whether a tensor is split only between its stacked matrices, on every rank."""
    cut = [tuple(s.stop - s.start for s in place[1:]) for place in places]
    return len(shape) > 2 and all(sizes == tuple(shape[1:]) for sizes in cut)


def _numel(place: Place) -> int:
    return int(torch.Size(s.stop - s.start for s in place).numel())


@cache
def _places(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], group: dist.ProcessGroup
) -> list[Place]:
    """Which part of a tensor each rank of the group has."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    places = []
    with unset_fake_temporarily():  # in a dry run, the mesh has real numbers
        for rank in dist.get_process_group_ranks(group):
            coordinate = [int(c) for c in (mesh.mesh == rank).nonzero()[0]]
            local, offset = _compute_local_shape_and_global_offset(shape, mesh.shape, coordinate, placements)
            places.append(tuple(slice(start, start + length) for start, length in zip(offset, local)))
    return places
