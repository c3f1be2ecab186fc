"""Parts of tensors in memory that all ranks of a host share: nothing is sent, each rank copies what it needs.

Buckets of tensors alternate between two slots. A rank lays a bucket out, waits for all, and reads; once all have
reached the next bucket they have read this one, so its slot is free for the bucket after.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.messages import from_all
from lockstep.rl.weights.server_memory import ServerMemory, place_of
from lockstep.rl.weights.shard_slices import LocalShard, offsets, volume


class SharedParts:
    """What each rank holds (`held`, by rank and name), bucket by bucket (`buckets` of names)."""

    def __init__(
        self,
        memories: list[ServerMemory],
        held: Sequence[Mapping[str, LocalShard]],
        buckets: Sequence[Sequence[str]],
        dtype: torch.dtype,
    ):
        self._memories, self._held, self._dtype = memories, held, dtype
        self._offsets = [
            {name: offset for names in buckets for name, offset in _laid_out(parts, names, dtype)[0].items()}
            for parts in held
        ]
        self._slot = 0

    def room(self, rank: int, name: str) -> Tensor:
        """The memory for a rank's part of a tensor of this bucket."""
        offset = self._offsets[rank][name]
        return self._memories[rank].room(self._slot, offset, self._held[rank][name].shard_slice, self._dtype)

    def wait_for_all(self) -> None:
        """Returns when every rank has laid out this bucket."""
        dist.barrier()

    def next_bucket(self) -> None:
        """Starts the next bucket; all ranks call it."""
        self._slot = 1 - self._slot


def share_parts(
    held: Sequence[Mapping[str, LocalShard]],
    buckets: Sequence[Sequence[str]],
    dtype: torch.dtype,
    rank: int,
    able: bool,
) -> SharedParts | None:
    """The shared memory of all ranks, all of which call this; None if any is not `able`, or they span several hosts.

    LOCKSTEP_SHARED_MEMORY=0 on any rank disables it.
    """
    able = able and os.environ.get("LOCKSTEP_SHARED_MEMORY", "1") != "0"
    sizes = [max(_laid_out(parts, names, dtype)[1] for names in buckets) for parts in held]
    own = ServerMemory.created(sizes[rank]) if able else None
    places = [place_of(place) for place in from_all(own and own.place)]
    memories = []
    with contextlib.suppress(OSError):  # ranks that do not see each other's processes
        for other, (place, size) in enumerate(zip(places, sizes)):
            if place is not None:
                memories.append(own if own and other == rank else ServerMemory.opened(place, size))
    everywhere = all(from_all(len(memories) == len(held)))
    if own is not None:
        own.hide()  # all readers have it open
    return SharedParts(memories, held, buckets, dtype) if everywhere else None


def _laid_out(parts: Mapping[str, LocalShard], names: Sequence[str], dtype: torch.dtype) -> tuple[dict[str, int], int]:
    return offsets({name: volume(parts[name].shard_slice) * dtype.itemsize for name in names if name in parts})
