"""The compiled kernels in the cache folder, and what happens without them."""

import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def form():
    """Processes of their own, which need no form of this one."""


PROGRAM = """
import torch
from lockstep import ops

print(ops.linear(torch.ones(2, 3), torch.ones(2, 3)).sum().item())
"""


def test_damaged_kernels_are_compiled_anew(tmp_path):
    # In a process of its own: without the check it would end by a signal.
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    run = [sys.executable, "-c", PROGRAM]
    assert subprocess.run(run, env=environment, capture_output=True, text=True).stdout.strip() == "12.0"
    (library,) = (tmp_path / "lockstep").glob("*.so")
    library.write_bytes(library.read_bytes()[:4096])
    assert subprocess.run(run, env=environment, capture_output=True, text=True).stdout.strip() == "12.0"


@pytest.mark.parametrize("compiler", ["/nonsense", "/bin/true", "/bin/false"])
def test_an_unusable_compiler_leaves_the_plain_forms_and_a_warning(tmp_path, compiler):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": compiler}
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "12.0" and "the plain PyTorch operators are used" in result.stderr
