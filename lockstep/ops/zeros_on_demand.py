"""Zeroed memory that is used only where something was written."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.ops import native

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform.startswith("linux") else 0
"""By default, Linux refuses a mapping that is larger than its memory. Python has the name since 3.13."""


def zeros_on_demand(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """`torch.zeros`; on a CPU, only pages that have been written to use memory.

    So a large, sparsely used cache costs little and is available at once: unwritten pages of a mapping read as zero.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or native.is_pretending() or nbytes == 0:
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # huge pages, as torch uses for large tensors (`THP_MEM_ALLOC_ENABLE`)
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
