"""A library's vector functions are called once, by one thread, before anybody else can."""

import subprocess
import sys

import pytest

SCRIPT = """
import torch
called = {name: [] for name in ("cos", "sqrt", "exp", "log", "tanh", "pow")}
for name, seen in called.items():
    def recorded(x, *rest, function=getattr(torch, name), seen=seen):
        seen.append((x.numel(), x.dtype))
        return function(x, *rest)
    setattr(torch, name, recorded)
import lockstep.ops
for name, seen in called.items():
    assert seen[:2] == [(1, torch.float32), (1, torch.float64)], (name, seen)
"""


@pytest.fixture(scope="module", autouse=True)
def form():
    """A process of its own, which needs no form of this one."""


def test_importing_the_operators_calls_each_function_on_one_element():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
