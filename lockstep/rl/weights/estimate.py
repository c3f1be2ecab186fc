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
from lockstep.rl.weights.shard_slices import ShardSlice, intersection, offsets, volume
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
    tensors: Mapping[str, Tensor], model: Decoder, world: World, in_place: bool = True, keep: bool = True
) -> TransferEstimate:
    """What `WeightTransfer(tensors, model, world, keep=keep)` moves on rank 0; the other ranks need not exist.

    With an adapter this is the first sync: later ones do not send frozen tensors. tensors: rank 0's, float32 or of the
    model's dtype, with or without values. in_place: whether the model shares the memory of those that fit
    (`materialize`).
    """
    coordinates = _coordinates(world)
    itemsize = model.dtype.itemsize
    sent = received = copies = buffers = 0
    parameters = dict(model.named_parameters())
    for names in buckets(model, _in_place(tensors, model, coordinates) if in_place else ()):
        bucket_sent = bucket_received = bucket_cast = 0
        for name in names:
            target_slices = _shard_slices(parameters[name], coordinates)
            local, copied = 0, True
            if name in tensors:
                source_slices = _shard_slices(tensors[name], coordinates)
                # Ranks of another stage have other tensors.
                owners = [
                    r
                    for r, coordinate in enumerate(coordinates)
                    if not coordinate["pipeline"] and source_slices[r] == source_slices[0]
                ]
                for target, shard_slice in enumerate(target_slices):
                    part = intersection(source_slices[0], shard_slice)
                    nearest = owners[target * len(owners) // len(coordinates)]
                    if part is not None and target not in owners and nearest == 0:
                        bucket_sent += volume(part) * itemsize
                overlap = intersection(source_slices[0], target_slices[0])
                local = volume(overlap) if overlap else 0
                copied = not in_place or source_slices[0] != target_slices[0] or tensors[name].dtype != model.dtype
                bucket_cast += volume(source_slices[0]) * itemsize * (tensors[name].dtype != model.dtype)
            copies += volume(target_slices[0]) * itemsize * (copied and keep)
            bucket_received += (volume(target_slices[0]) - local) * itemsize
        sent, received = sent + bucket_sent, received + bucket_received
        buffers = max(buffers, copies + bucket_cast + bucket_sent + bucket_received)
    return TransferEstimate(sent, received, buffers)


def estimate_weight_server(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Bytes that rank 0 writes per version for generators in other processes: its shards of all tensors."""
    parts = {name: local_values(tensor.detach()) for name, tensor in tensors.items()}
    return offsets({name: part.numel() * dtype.itemsize for name, part in parts.items()})[1]


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


def _in_place(tensors: Mapping[str, Tensor], model: Decoder, coordinates: list[dict[str, int]]) -> set[str]:
    """Tensors whose memory every rank's generator shares with its trainer (`materialize`)."""
    if any(coordinate["pipeline"] for coordinate in coordinates):
        return set()
    return {
        name
        for name, parameter in model.named_parameters()
        if tensors[name].dtype == model.dtype
        and _shard_slices(tensors[name], coordinates) == _shard_slices(parameter, coordinates)
    }
