"""The same bits from run to run, on CUDA too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """While open and `wanted`, torch uses deterministic kernels, or raises RuntimeError where there is none.

    Must be opened before the process first uses CUDA: cuBLAS reads its workspace setting then.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    # It would write every new tensor once more, for code that reads what it never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
