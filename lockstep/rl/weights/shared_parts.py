"""Shards in memory that all ranks of a host share: instead of messages, each rank copies what it needs.

Buckets of tensors alternate between two slots. A rank writes its part of a bucket, waits for all ranks, and reads; once
all have reached the next bucket they have read this one, and its slot is free for the bucket after.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.messages import from_all
from lockstep.rl.weights.server_memory import ServerMemory, handle_of
from lockstep.rl.weights.shard_slices import LocalShard, offsets, volume


class SharedParts:
    """Each rank's shards in shared memory; shards: by rank and name."""

    def __init__(
        self,
        memories: list[ServerMemory],
        shards: Sequence[Mapping[str, LocalShard]],
        buckets: Sequence[Sequence[str]],
        dtype: torch.dtype,
    ):
        self._memories, self._shards, self._dtype = memories, shards, dtype
        self._offsets = [
            {name: offset for names in buckets for name, offset in _layout(parts, names, dtype)[0].items()}
            for parts in shards
        ]
        self._slot = 0

    def view(self, rank: int, name: str) -> Tensor:
        """The memory for a rank's shard of a tensor in this bucket."""
        offset = self._offsets[rank][name]
        return self._memories[rank].view(self._slot, offset, self._shards[rank][name].shard_slice, self._dtype)

    def wait_for_all(self) -> None:
        """Returns when every rank has written this bucket."""
        dist.barrier()

    def next_bucket(self) -> None:
        """Starts the next bucket; all ranks call it."""
        self._slot = 1 - self._slot


def share_parts(
    shards: Sequence[Mapping[str, LocalShard]],
    buckets: Sequence[Sequence[str]],
    dtype: torch.dtype,
    rank: int,
    enabled: bool,
) -> SharedParts | None:
    """The shared memory of all ranks, which all call this; None if they span several hosts, or it is off on any rank.

    LOCKSTEP_SHARED_MEMORY=0 turns it off.
    """
    enabled = enabled and os.environ.get("LOCKSTEP_SHARED_MEMORY", "1") != "0"
    sizes = [max(_layout(parts, names, dtype)[1] for names in buckets) for parts in shards]
    local = ServerMemory.created(sizes[rank]) if enabled else None
    handles = [handle_of(handle) for handle in from_all(local and local.handle)]
    memories = []
    with contextlib.suppress(OSError):  # of ranks that cannot see each other's processes
        for other, (handle, size) in enumerate(zip(handles, sizes)):
            if handle is not None:
                memories.append(local if local and other == rank else ServerMemory.opened(handle, size))
    everywhere = all(from_all(len(memories) == len(shards)))
    if local is not None:
        local.unlink()  # all readers have it open
    return SharedParts(memories, shards, buckets, dtype) if everywhere else None


def _layout(parts: Mapping[str, LocalShard], names: Sequence[str], dtype: torch.dtype) -> tuple[dict[str, int], int]:
    return offsets({name: volume(parts[name].shard_slice) * dtype.itemsize for name in names if name in parts})
