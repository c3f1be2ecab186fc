"""How the C library handles freed memory."""

from __future__ import annotations

import ctypes
import sys

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**27
"""In bytes. The head's gradient and its slices of logits are about this large."""
LARGEST_BEFORE_2_35 = 2**25
"""Of glibc before version 2.35, which takes no larger threshold (mallopt's manual page)."""


def keep_freed_memory() -> None:
    """Lets this process reuse freed blocks instead of returning those over 32 MB to the system.

    A training step allocates and frees the same gigabytes each time, and the system clears every page it hands out,
    which takes a twentieth of a step on two cores. Kept memory fragments: the peak can grow, more so if a step's
    tensors have many sizes. Does nothing if the C library is not glibc.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if not mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT):
            mallopt(M_MMAP_THRESHOLD, LARGEST_BEFORE_2_35)
        mallopt(M_TRIM_THRESHOLD, -1)
