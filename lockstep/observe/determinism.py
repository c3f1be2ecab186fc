"""Bitwise identical results from run to run, on CUDA too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def determinism(enabled: bool) -> Iterator[None]:
    """If `enabled`, torch uses deterministic kernels within this context, and raises RuntimeError if there is none.

    Enter it before the process first uses CUDA, which is when cuBLAS reads its workspace setting.
    """
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    # It would fill every new tensor, which only code that reads uninitialized memory needs.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
