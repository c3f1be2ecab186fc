"""Memory in which one rank lays out its parts of the weights, and which other processes of its host read.

A page of marks, then slots that are written in turns. A slot's mark is the turn whose weights lie there, and the
negative turn while they are being written: a reader looks at it before and after, and knows what it has read. What the
processor reorders of that, a checksum of what was read still shows.

The memory is a file outside every folder (`memfd`): nothing is left behind however either side ends.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.shared_memory import create_memory, open_memory
from lockstep.rl.actors.boxes import Box

MARKS = 4096
"""Bytes before the slots."""


class ShelfMemory:
    """Slots of `size` bytes, written here or by another process."""

    def __init__(self, content: mmap.mmap, size: int, place: tuple[int, int, str] | None = None):
        self._content, self.size, self.place = content, size, place
        with warnings.catch_warnings():  # of a tensor that nobody may write: nobody does
            warnings.simplefilter("ignore")
            self._bytes = torch.frombuffer(content, dtype=torch.uint8)
        self._marks = self._bytes[:MARKS].view(torch.int64)

    @classmethod
    def created(cls, size: int, slots: int = 2) -> ShelfMemory:
        """Fresh memory; `place` says where other processes find it, and is None where they cannot."""
        place = create_memory(length_of(size, slots))
        content = mmap.mmap(-1 if place is None else place[1], length_of(size, slots))
        return cls(content, size, place)

    @classmethod
    def opened(cls, place: tuple[int, int, str], size: int, slots: int = 2) -> ShelfMemory:
        """What another process of this host has created, to be read. Raises OSError where it cannot be had."""
        file = open_memory(*place, flags=os.O_RDONLY)
        try:
            if os.fstat(file).st_size != length_of(size, slots):
                raise OSError("it has another size")
            return cls(mmap.mmap(file, length_of(size, slots), prot=mmap.PROT_READ), size)
        finally:
            os.close(file)

    def mark(self, slot: int) -> int:
        return int(self._marks[slot])

    def set_mark(self, slot: int, mark: int) -> None:
        self._marks[slot] = mark

    def room(self, slot: int, offset: int, box: Box, dtype: torch.dtype) -> Tensor:
        """The view of a part that lies at `offset` in a slot."""
        shape = [stop - start for start, stop in box]
        start = MARKS + slot * _rounded(self.size) + offset
        return self._bytes[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def hide(self) -> None:
        """From now on nobody can open it who has not; it goes when the last of them ends."""
        if self.place is not None:
            os.close(self.place[1])
            self.place = None

    def close(self) -> None:
        """Gives the memory back; no room of it may be used any more."""
        del self._bytes, self._marks
        self._content.close()
        if self.place is not None:
            os.close(self.place[1])


def _rounded(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def length_of(size: int, slots: int) -> int:
    """Bytes of so many slots of `size`, with their marks."""
    return MARKS + slots * _rounded(size)


def place_of(plain: Any) -> tuple[int, int, str] | None:
    """A `place` that has come as JSON."""
    return None if plain is None else (plain[0], plain[1], plain[2])
