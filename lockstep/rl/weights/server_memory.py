"""Memory with one rank's shards of the weights, which other processes on its host can read.

A page of marks, then the slots. As in a seqlock, a slot's mark is the sequence number of the version in it, negative
while it is being written: a reader checks it before and after reading. If the processor reorders these accesses, the
checksum still shows it.

The memory is an anonymous file (`memfd`): nothing is left behind, however either side ends.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.shared_memory import create_memory, open_memory
from lockstep.rl.weights.shard_slices import ShardSlice

MARKS = 4096
"""Bytes before the slots."""


class ServerMemory:
    """Slots of `size` bytes, written here or by another process."""

    def __init__(self, content: mmap.mmap, size: int, handle: tuple[int, int, str] | None = None):
        self._content, self.size, self.handle = content, size, handle
        with warnings.catch_warnings():  # about a read-only tensor, which is never written
            warnings.simplefilter("ignore")
            self._bytes = torch.frombuffer(content, dtype=torch.uint8)
        self._marks = self._bytes[:MARKS].view(torch.int64)

    @classmethod
    def created(cls, size: int, slots: int = 2) -> ServerMemory:
        """New memory; `handle` is how other processes open it, None if they cannot."""
        handle = create_memory(memory_bytes(size, slots))
        content = mmap.mmap(-1 if handle is None else handle[1], memory_bytes(size, slots))
        return cls(content, size, handle)

    @classmethod
    def opened(cls, handle: tuple[int, int, str], size: int, slots: int = 2) -> ServerMemory:
        """Opens, for reading, memory of another process on this host. Raises OSError if that is not possible."""
        file = open_memory(*handle, flags=os.O_RDONLY)
        try:
            if os.fstat(file).st_size != memory_bytes(size, slots):
                raise OSError("its size is wrong")
            return cls(mmap.mmap(file, memory_bytes(size, slots), prot=mmap.PROT_READ), size)
        finally:
            os.close(file)

    def mark(self, slot: int) -> int:
        return int(self._marks[slot])

    def set_mark(self, slot: int, mark: int) -> None:
        self._marks[slot] = mark

    def view(self, slot: int, offset: int, shard_slice: ShardSlice, dtype: torch.dtype) -> Tensor:
        """The view of a shard at `offset` in a slot."""
        shape = [stop - start for start, stop in shard_slice]
        start = MARKS + slot * _rounded(self.size) + offset
        return self._bytes[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def unlink(self) -> None:
        """No other process can open it from now on; it is freed when the last one that has it open ends."""
        if self.handle is not None:
            os.close(self.handle[1])
            self.handle = None

    def close(self) -> None:
        """Frees the memory; no view of it may be used afterwards."""
        del self._bytes, self._marks
        self._content.close()
        if self.handle is not None:
            os.close(self.handle[1])


def _rounded(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def memory_bytes(size: int, slots: int) -> int:
    """Total bytes of this many slots of `size`, with their marks."""
    return MARKS + slots * _rounded(size)


def handle_of(plain: Any) -> tuple[int, int, str] | None:
    """A handle from JSON."""
    return None if plain is None else (plain[0], plain[1], plain[2])
