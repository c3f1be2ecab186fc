"""Copies of a run's tensors in host memory, to save them while training continues."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.checkpoint.part import Part


class Staging:
    """Buffers for one copy of every tensor, pinned if it is on a GPU, and reused by every save."""

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
