"""Runs `cuda_kernels.py` and `cuda_grouped.py` under Triton's interpreter, in a process of its own: triton must see the
setting at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LARGE = (
    "1024 or 2048 or 9000 or 1100 or replayed or twice_the_height or sizes3 or (chunks and (70 or dtype1))"
    " or (dtype1 and (259 or broken or attend or attention)) or (value and broken) or (gradient_of_attention and 4-2)"
    " or (pieces_of_sequences and 40)"
)


@pytest.fixture(scope="module", autouse=True)
def form():
    """The kernels have one form: the folder's own fixture would run everything twice."""


@pytest.mark.parametrize(
    "chosen",
    [
        # In one process: its imports take as long as half of the tests.
        pytest.param(f"not ({LARGE})", id="small"),
        pytest.param(LARGE, id="large", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_keep_their_promises_under_the_interpreter(chosen):
    pytest.importorskip("triton", reason="triton is published for Linux on x86-64 alone")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOCKSTEP_NATIVE": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", chosen]
    command += [str(Path(__file__).with_name(name)) for name in ("cuda_kernels.py", "cuda_grouped.py")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
