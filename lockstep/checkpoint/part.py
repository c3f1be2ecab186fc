"""One rank's part of a named tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.model.shard import local_part
from lockstep.model.stored import stored_as


class Part:
    """The values in `local`, which belong at `place` in a tensor of `shape`, independent of any parallel layout."""

    def __init__(self, local: Tensor, place: tuple[slice, ...], shape: torch.Size):
        self.local, self.place, self.shape = local, place, shape
        assert local.numel() == math.prod(self.shard_slice[1]), f"{list(local.shape)} are not the values at {place}"

    @classmethod
    def of(cls, tensor: Tensor) -> Part:
        """This rank's part of `tensor`, sharing its memory: all of it, unless it is a DTensor."""
        local, place = local_part(tensor.detach())
        return cls(local, place, tensor.shape)

    @classmethod
    def stored(cls, name: str, tensor: Tensor) -> dict[str, Part]:
        """This rank's parts of the tensors that store parameter `name`, with these values, in a model's files."""
        whole = cls.of(tensor)
        parts = {}
        for stored in stored_as(name, tensor.shape):
            shape = torch.Size(stored.tensors(tensor.shape)[stored.name])
            if stored.expert is None:
                parts[stored.name] = cls(stored.of(whole.local), stored.place(whole.place), shape)
            elif whole.place[0].start <= stored.expert < whole.place[0].stop:
                expert = whole.local[stored.expert - whole.place[0].start]
                parts[stored.name] = cls(expert, stored.place(whole.place), shape)
        return parts

    @property
    def shard_slice(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of `place`."""
        return tuple(cut.start for cut in self.place), tuple(cut.stop - cut.start for cut in self.place)
