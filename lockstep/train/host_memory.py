"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import sys

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**27
"""Bytes. The head's gradient and its slices of logits are about as large."""


def keep_freed_memory() -> None:
    """Lets this process reuse blocks that it frees, instead of giving those over 32 MB back to the system.

    A training step takes and frees the same gigabytes each time, and the system clears every page that it hands out:
    a twentieth of a step on two cores. What is kept lies in pieces: the peak can grow by a part, more so where a
    step's tensors are of many sizes. Does nothing where the C library is not glibc.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, -1)
