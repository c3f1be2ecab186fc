"""What a weight sync sends, receives and holds on rank 0, from the layouts alone: a `WeightTransfer` without ranks."""

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
from lockstep.rl.weights.shard_slices import ShardSlice, common, offsets, volume
from lockstep.rl.weights.transfer import buckets


@dataclass
class TransferEstimate:
    """Bytes on rank 0 in one weight sync."""

    sent: int
    """To other ranks."""
    received: int
    """From other ranks."""
    held: int
    """Peak memory beyond the weights themselves: copies that have arrived, and what is in flight."""


def estimate_transfer(
    tensors: Mapping[str, Tensor], model: Decoder, world: World, in_place: bool = True, keep: bool = True
) -> TransferEstimate:
    """What `WeightTransfer(tensors, model, world, keep=keep)` moves on rank 0, whether or not the other ranks exist. Of
    an adapter's run this is the first sync: later ones do not send what is frozen.

    tensors: rank 0's, float32 or of the model's dtype, with or without values. in_place: whether the model reads those
    that fit in place (`own_weights`).
    """
    places = _places(world)
    itemsize = model.dtype.itemsize
    sent = received = arrived = held = 0
    parameters = dict(model.named_parameters())
    for names in buckets(model, _staying(tensors, model, places) if in_place else ()):
        sent_of_bucket = received_of_bucket = rounded = 0
        for name in names:
            wanted = _shard_slices(parameters[name], places)
            kept, copied = 0, True
            if name in tensors:
                held_by = _shard_slices(tensors[name], places)
                # Ranks of another stage have other tensors.
                holders = [r for r, place in enumerate(places) if not place["pipeline"] and held_by[r] == held_by[0]]
                for target, shard_slice in enumerate(wanted):
                    part = common(held_by[0], shard_slice)
                    nearest = holders[target * len(holders) // len(places)]
                    if part is not None and target not in holders and nearest == 0:
                        sent_of_bucket += volume(part) * itemsize
                own = common(held_by[0], wanted[0])
                kept = volume(own) if own else 0
                copied = not in_place or held_by[0] != wanted[0] or tensors[name].dtype != model.dtype
                rounded += volume(held_by[0]) * itemsize * (tensors[name].dtype != model.dtype)
            arrived += volume(wanted[0]) * itemsize * (copied and keep)
            received_of_bucket += (volume(wanted[0]) - kept) * itemsize
        sent, received = sent + sent_of_bucket, received + received_of_bucket
        held = max(held, arrived + rounded + sent_of_bucket + received_of_bucket)
    return TransferEstimate(sent, received, held)


def estimate_weight_server(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Bytes of each version that rank 0 lays out for generators in other processes: all it holds."""
    parts = {name: local_values(tensor.detach()) for name, tensor in tensors.items()}
    return offsets({name: part.numel() * dtype.itemsize for name, part in parts.items()})[1]


def _places(world: World) -> list[dict[str, int]]:
    """For each rank, its index along every axis, and its index among the ranks that share one copy of the weights."""
    degrees = [world.degrees[axis] for axis in AXES]
    places = []
    for rank in range(world.size):
        place = dict(zip(AXES, map(int, np.unravel_index(rank, degrees))))
        places.append(place | {"shard": place["data_shard"] * world.degrees["context"] + place["context"]})
    return places


def _shard_slices(tensor: Tensor, places: list[dict[str, int]]) -> list[ShardSlice]:
    """Which part of `tensor` each rank has."""
    if not isinstance(tensor, DTensor):
        return [tuple((0, size) for size in tensor.shape)] * len(places)
    mesh = tensor.device_mesh
    axes = mesh.mesh_dim_names or ()
    found: dict[tuple[int, ...], ShardSlice] = {}
    shard_slices = []
    for place in places:
        here = tuple(place[axis] for axis in axes)
        if here not in found:
            shape, offset = _compute_local_shape_and_global_offset(
                tensor.shape, tuple(mesh.shape), list(here), tensor.placements
            )
            found[here] = tuple((start, start + size) for start, size in zip(offset, shape))
        shard_slices.append(found[here])
    return shard_slices


def _staying(tensors: Mapping[str, Tensor], model: Decoder, places: list[dict[str, int]]) -> set[str]:
    """Tensors that every rank's generator reads in place from its trainer (`own_weights`)."""
    if any(place["pipeline"] for place in places):
        return set()
    return {
        name
        for name, parameter in model.named_parameters()
        if tensors[name].dtype == model.dtype
        and _shard_slices(tensors[name], places) == _shard_slices(parameter, places)
    }
