"""Estimates what a weight sync sends, receives and allocates on rank 0 from the layouts alone, without other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from lockstep.model import Decoder
from lockstep.model.shard import local_values
from lockstep.parallel import World
from lockstep.parallel.world import AXES
from lockstep.rl.weights.shard_slices import Owners, ShardSlice, pieces_between, volume
from lockstep.rl.weights.transfer import buckets


@dataclass
class TransferEstimate:
    """Bytes on rank 0 in one weight sync."""

    sent: int
    """To other ranks."""
    received: int
    """From other ranks."""
    buffers: int
    """Peak memory beyond the weights themselves: copies received so far, and messages in flight."""


def estimate_transfer(
    tensors: Mapping[str, Tensor], model: Decoder, world: World, keep: bool = True
) -> TransferEstimate:
    """What `WeightTransfer(tensors, model, world, keep=keep)` moves on rank 0; the other ranks need not exist.

    With an adapter this is the first sync: later ones do not send frozen tensors. tensors: rank 0's, float32 or of the
    model's dtype, with or without values; the model shares the memory of those that fit (`materialize`).
    """
    ranks = _coordinates(world)
    stage = [rank for rank, at in enumerate(ranks) if not at["pipeline"]]  # other stages have other tensors
    targets = {name: _shard_slices(parameter, ranks) for name, parameter in model.named_parameters()}
    sources = {name: _shard_slices(tensor, ranks) for name, tensor in tensors.items()}
    fitting = {n for n, tensor in tensors.items() if tensor.dtype == model.dtype and sources[n] == targets[n]}
    sent = received = copies = buffers = 0
    for names in buckets(model, fitting if len(stage) == len(ranks) else ()):
        moved = [0, 0, 0]  # sent, received, cast
        for name in names:
            needed = volume(targets[name][0])
            copies += needed * keep * (name not in fitting)
            if name not in tensors:
                moved[1] += needed
                continue
            owners: Owners = {}
            for rank in stage:
                owners.setdefault(sources[name][rank], []).append(rank)
            for piece in pieces_between(owners, targets[name]):
                moved[0] += volume(piece.shard_slice) * (piece.source == 0 != piece.target)
                moved[1] += volume(piece.shard_slice) * (piece.target == 0 != piece.source)
            moved[2] += volume(sources[name][0]) * (tensors[name].dtype != model.dtype)
        sent, received, buffers = sent + moved[0], received + moved[1], max(buffers, copies + sum(moved))
    size = model.dtype.itemsize
    return TransferEstimate(sent * size, received * size, buffers * size)


def estimate_weight_server(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Bytes that rank 0 copies per version for generators in other processes: its shards of all tensors."""
    return sum(local_values(tensor.detach()).numel() for tensor in tensors.values()) * dtype.itemsize


def _coordinates(world: World) -> list[dict[str, int]]:
    """Each rank's index along every axis, and its `shard` index among the ranks that share one copy of the weights."""
    degrees = [world.degrees[axis] for axis in AXES]
    coordinates = []
    for rank in range(world.size):
        index = dict(zip(AXES, map(int, np.unravel_index(rank, degrees))))
        coordinates.append(index | {"shard": index["data_shard"] * world.degrees["context"] + index["context"]})
    return coordinates


def _shard_slices(tensor: Tensor, coordinates: list[dict[str, int]]) -> list[ShardSlice]:
    """Each rank's slice of `tensor`."""
    if not isinstance(tensor, DTensor):
        return [tuple((0, size) for size in tensor.shape)] * len(coordinates)
    mesh = tensor.device_mesh
    axes = mesh.mesh_dim_names or ()
    by_index: dict[tuple[int, ...], ShardSlice] = {}
    shard_slices = []
    for coordinate in coordinates:
        index = tuple(coordinate[axis] for axis in axes)
        if index not in by_index:
            shape, offset = _compute_local_shape_and_global_offset(
                tensor.shape, tuple(mesh.shape), list(index), tensor.placements
            )
            by_index[index] = tuple((start, start + size) for start, size in zip(offset, shape))
        shard_slices.append(by_index[index])
    return shard_slices
