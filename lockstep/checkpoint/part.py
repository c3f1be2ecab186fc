"""One rank's parts of named tensors, and their copies in host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.model import ModelConfig
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
    def stored(cls, name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Part]:
        """This rank's parts of the tensors that store parameter `name`, with these values, in a model's files."""
        whole = cls.of(tensor)
        parts = {}
        for stored in stored_as(name, tensor.shape, config):
            shape = torch.Size(stored.shape_for(tensor.shape))
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


class Staging:
    """Copies of a run's tensors in host memory, to save them while training continues.

    Every save reuses the buffers, which are pinned if a tensor is on a GPU.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, tuple[Part, torch.dtype]]) -> dict[str, Part]:
        """Copies `tensors`, each in its dtype. Overwrites the copies of the previous call."""
        parts = {}
        on_gpu = False
        for name, (part, dtype) in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != part.local.shape or buffer.dtype != dtype:
                buffer = torch.empty(part.local.shape, dtype=dtype, pin_memory=part.local.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(part.local, non_blocking=True)
            on_gpu |= part.local.is_cuda
            parts[name] = Part(buffer, part.place, part.shape)
        if on_gpu:
            torch.cuda.synchronize()
        return parts

    def release(self) -> None:
        self._buffers.clear()


def in_place(tensors: Mapping[str, tuple[Part, torch.dtype]]) -> dict[str, Part]:
    """`tensors`, each in its dtype in host memory, if possible without a copy: they must not change during the save."""
    parts = {}
    for name, (part, dtype) in tensors.items():
        parts[name] = Part(part.local.to("cpu", dtype), part.place, part.shape)
    return parts
