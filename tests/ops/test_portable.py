"""One digest of every portable kernel on every instruction set: in this processor's own, and on an emulated ARM."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep.ops.native import compiling
from lockstep.ops.native.instruction_sets import BY_MACHINE, supported

SELF_TEST = Path(__file__).with_name("self_test.cpp")
EXPECTED = """\
product 7d84624a88a380ae
product across 3af808d50580c7bc
product in bfloat16 1a6cfbe1c8a02c7b
product b14f7d88a7a65581
product across a4d0037113bae916
product in bfloat16 e5ca14558b9843da
product 39b0eba9b901c214
product across 0bbd88df5b21b90d
product in bfloat16 98593b8caae209e7
attention 709cb33b28139afb
its log-sums f46a73a75f95cf77
its gradient 43790f7c412e255b
its gradient of keys 5ede1eb1f2531ca7
norm 770ac47258e7f458
activation 7c8ad0b6e53f82c7
rotation fd41400e510e0037
log-probabilities 8516cadb02914add
entropies 9a912d0146f723d5
draws 4e73fc1bb5d2a4c7
weights of buckets ba9660ac7af583a7
cuts 9f63f53fe1ea1a7c
product in chunks 480da842a120bc0d
its sums in bfloat16 40ea57a253844337
"""
"""The digest so far after each operator: where two differ, the first line that does names it."""


@pytest.fixture(scope="module", autouse=True)
def form():
    """Programs of their own, which need no form of this process."""


def run_self_test(folder: Path, compiler: str, flags: list[str], *runner: str) -> str:
    program = folder / "self_test"
    sources = [str(SELF_TEST), *map(str, sorted(compiling.SOURCES.glob("*.cpp")))]
    # -O1 and one thread: what is tested is the source's meaning, not the compiler's patience.
    options = [flag for flag in compiling.FLAGS if flag not in ("-O3", "-fPIC")]
    subprocess.run([compiler, "-O1", *options, *flags, "-static-libgcc", *sources, "-o", str(program)], check=True)
    return subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", [each.name for each in supported() if each.arithmetic == "portable"])
def test_every_instruction_set_computes_the_same_bits(tmp_path, name):
    compiler = compiling.find_compiler()
    assert compiler, "these tests need a C++ compiler: install g++"
    flags = next(each.flags for each in supported() if each.name == name)
    assert run_self_test(tmp_path, compiler, list(flags)) == EXPECTED


def test_arm_computes_the_same_bits_too(tmp_path):
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if platform.machine() == "aarch64" or not (shutil.which(compiler) and shutil.which(emulator)):
        pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user")
    neon = BY_MACHINE["aarch64"][0]
    output = run_self_test(tmp_path, compiler, ["-static", *neon.flags], emulator)
    assert output == EXPECTED
