"""The part of a named tensor that one rank holds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.model.shard import local_part
from lockstep.model.stored import stored_as


class Part:
    """The values in `local`, which belong at `place` in a tensor of `shape`; nothing else about a layout is known."""

    def __init__(self, local: Tensor, place: tuple[slice, ...], shape: torch.Size):
        self.local, self.place, self.shape = local, place, shape
        assert local.numel() == math.prod(self.shard_slice[1]), f"{list(local.shape)} are not the values at {place}"

    @classmethod
    def of(cls, tensor: Tensor) -> Part:
        """This rank's part of `tensor`, in its own memory: all of it, unless it is a DTensor."""
        local, place = local_part(tensor.detach())
        return cls(local, place, tensor.shape)

    @classmethod
    def stored(cls, name: str, tensor: Tensor) -> dict[str, Part]:
        """This rank's parts of the tensors as which parameter `name`, with these values, is in a model's files."""
        whole = cls.of(tensor)
        found = {}
        for stored in stored_as(name, tensor.shape):
            shape = torch.Size(stored.tensors(tensor.shape)[stored.name])
            if stored.expert is None:
                found[stored.name] = cls(stored.of(whole.local), stored.place(whole.place), shape)
            elif whole.place[0].start <= stored.expert < whole.place[0].stop:
                own = whole.local[stored.expert - whole.place[0].start]
                found[stored.name] = cls(own, stored.place(whole.place), shape)
        return found

    @property
    def shard_slice(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of the place."""
        return tuple(cut.start for cut in self.place), tuple(cut.stop - cut.start for cut in self.place)
