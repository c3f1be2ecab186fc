"""Runs `cuda_kernels.py`, `cuda_grouped.py`, `cuda_integers.py`, `cuda_float8.py`, `cuda_delta.py` and
`train/cuda_graphs.py` under Triton's interpreter, in a process of its own: triton must see the setting at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def form():
    """The kernels have one form: the folder's own fixture would run everything twice."""


@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_keep_their_promises_under_the_interpreter(chosen):
    pytest.importorskip("triton", reason="triton is published for Linux on x86-64 alone")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOCKSTEP_NATIVE": "0", "OMP_NUM_THREADS": "1"}
    # In one process: its imports take as long as half of the tests.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", chosen]
    names = (
        "cuda_kernels.py",
        "cuda_grouped.py",
        "cuda_integers.py",
        "cuda_float8.py",
        "cuda_delta.py",
        "../train/cuda_graphs.py",
    )
    command += [str(Path(__file__).parent / name) for name in names]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
