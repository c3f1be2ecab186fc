"""A function of whole matrices applied to sharded ones: each matrix is gathered to one rank and scattered back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from lockstep.model.shard import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

Place = tuple[slice, ...]


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
