"""How the C library handles freed memory."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**27
"""In bytes; about the size of the head's gradient and of slices of logits."""
LARGEST_BEFORE_2_35 = 2**25
"""The maximum threshold of glibc before version 2.35 (mallopt's manual page)."""


def keep_freed_memory() -> None:
    """Lets this process reuse freed blocks instead of returning those over 32 MB to the system.

    Each training or prefill step allocates and frees the same gigabytes, and the system clears every page before
    handing it out, which takes 5 to 10% of a step on two cores. Retained memory fragments: the peak can grow, more so
    if a step's tensors have many sizes. Does nothing if the C library is not glibc.
    """
    mallopt = _of_the_c_library("mallopt")
    if mallopt is not None:
        if not mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT):
            mallopt(M_MMAP_THRESHOLD, LARGEST_BEFORE_2_35)
        mallopt(M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Returns retained memory to the system. Does nothing if the C library is not glibc."""
    if (trim := _of_the_c_library("malloc_trim")) is not None:
        trim(ctypes.c_size_t(0))


def _of_the_c_library(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
