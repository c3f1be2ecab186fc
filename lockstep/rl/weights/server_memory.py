"""Memory in which one rank lays out its parts of the weights, and which other processes on its host read.

A page of marks, then slots that are written in turn. A slot's mark is the turn whose weights it holds, or the negative
turn while they are being written: a reader checks it before and after reading. If the processor reorders these
accesses, the checksum of what was read still shows it.

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

    def __init__(self, content: mmap.mmap, size: int, place: tuple[int, int, str] | None = None):
        self._content, self.size, self.place = content, size, place
        with warnings.catch_warnings():  # about a read-only tensor, which nobody writes
            warnings.simplefilter("ignore")
            self._bytes = torch.frombuffer(content, dtype=torch.uint8)
        self._marks = self._bytes[:MARKS].view(torch.int64)

    @classmethod
    def created(cls, size: int, slots: int = 2) -> ServerMemory:
        """New memory; `place` says where other processes find it, and is None if they cannot."""
        place = create_memory(length_of(size, slots))
        content = mmap.mmap(-1 if place is None else place[1], length_of(size, slots))
        return cls(content, size, place)

    @classmethod
    def opened(cls, place: tuple[int, int, str], size: int, slots: int = 2) -> ServerMemory:
        """Opens what another process on this host created, for reading. Raises OSError if that is not possible."""
        file = open_memory(*place, flags=os.O_RDONLY)
        try:
            if os.fstat(file).st_size != length_of(size, slots):
                raise OSError("its size is wrong")
            return cls(mmap.mmap(file, length_of(size, slots), prot=mmap.PROT_READ), size)
        finally:
            os.close(file)

    def mark(self, slot: int) -> int:
        return int(self._marks[slot])

    def set_mark(self, slot: int, mark: int) -> None:
        self._marks[slot] = mark

    def room(self, slot: int, offset: int, shard_slice: ShardSlice, dtype: torch.dtype) -> Tensor:
        """The view of a part at `offset` in a slot."""
        shape = [stop - start for start, stop in shard_slice]
        start = MARKS + slot * _rounded(self.size) + offset
        return self._bytes[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def hide(self) -> None:
        """From now on no other process can open it; it is freed when the last one that has it open ends."""
        if self.place is not None:
            os.close(self.place[1])
            self.place = None

    def close(self) -> None:
        """Frees the memory; no view of it may be used afterwards."""
        del self._bytes, self._marks
        self._content.close()
        if self.place is not None:
            os.close(self.place[1])


def _rounded(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def length_of(size: int, slots: int) -> int:
    """Total bytes of this many slots of `size`, with their marks."""
    return MARKS + slots * _rounded(size)


def place_of(plain: Any) -> tuple[int, int, str] | None:
    """A `place`, from JSON."""
    return None if plain is None else (plain[0], plain[1], plain[2])
