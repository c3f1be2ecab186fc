"""A wheel brings the kernels compiled: where it is installed no compiler is needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = """
import torch
from pathlib import Path
from lockstep import ops
from lockstep.ops import native, plain

x, w = torch.randn(5, 70), torch.randn(33, 70)
assert torch.equal(ops.linear(x, w), plain.product(x, w.T))
print(native.library()._name, ops.instruction_set(), ops.arithmetic())
"""


@pytest.mark.slow
def test_a_wheel_is_fast_without_a_compiler(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "lockstep", source / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("lockstep_lm-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)

    from lockstep.ops.native.instruction_sets import supported

    for each in supported():
        environment = {
            "PATH": "/nonexistent", "PYTHONPATH": str(site), "LOCKSTEP_ISA": each.name,
            "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": os.environ.get("HOME", "/"),
        }  # fmt: skip
        result = subprocess.run(
            [sys.executable, "-c", CHECK], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        library, instructions, arithmetic = result.stdout.split()
        assert Path(library).is_relative_to(site) and instructions == each.name and arithmetic == each.arithmetic
    assert not list((tmp_path / "cache").rglob("*.so"))
