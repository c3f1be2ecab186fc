"""One digest of every kernel in each arithmetic: on all instruction sets of this processor, and on an emulated ARM."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep.ops.native import build, compiling
from lockstep.ops.native.instruction_sets import BY_MACHINE, supported

OTHERS = [each for each in supported() if each.arithmetic == "portable" and each.name.startswith("avx512")][1:]
"""Sets whose kernels no other test compiles."""
SOME = [each for each in supported() if each not in OTHERS]
SELF_TEST = Path(__file__).with_name("self_test.cpp")
ARITHMETICS = ("portable", "bf16_pairs", "bf16_tiles")
EXPECTED = """\
products 1a6cfbe1c8a02c7b 1a6cfbe1c8a02c7b 1a6cfbe1c8a02c7b
products e5ca14558b9843da e5ca14558b9843da e5ca14558b9843da
products 98593b8caae209e7 98593b8caae209e7 10c8ca9f9ecd6e84
attention and its gradients 5ede1eb1f2531ca7 5ede1eb1f2531ca7 dd4f39c8d77c865c
norm 770ac47258e7f458 770ac47258e7f458 b4ded3ca5f356db7
activation 7c8ad0b6e53f82c7 7c8ad0b6e53f82c7 d071bf16b83d0664
rotation fd41400e510e0037 fd41400e510e0037 0014b0b8bcc01984
log-probabilities and entropies 9a912d0146f723d5 9a912d0146f723d5 30be479efd0ec26e
draws 4e73fc1bb5d2a4c7 4e73fc1bb5d2a4c7 3a292b0bf2b5036c
weights of buckets ba9660ac7af583a7 ba9660ac7af583a7 5fed95feb41db9e8
cuts 9f63f53fe1ea1a7c 9f63f53fe1ea1a7c 65c5a8ce2bf80233
product in chunks 480da842a120bc0d 480da842a120bc0d ef792fc89f890492
its sums in bfloat16 40ea57a253844337 4d40c6e1a13ec817 12e272223a732cde
attention in bfloat16 and its gradients 633e5a6332fbce6b 597260da61e52efb 6f054ab0136aa3f2
attention in bfloat16 and its gradients 65fdd5f99f1c2933 79f0c06fe0fa3acf e991e0ec15544a26
attention in a window with sinks and its gradients 034dce31bc98fbda b9b67ba91a89374e b01b1b6d22615177
attention in bfloat16 and its gradients 4f88f72f90f1b34f 69473ccfde98e6e8 68d28564e19c3aef
attention in bfloat16 and its gradients 0cfb5d2595773c75 a3350b0c364c56f6 8046fb5a4ccd0b9d
clamped activation and its gradients 97e580a01bb62d1f efddb7a45488768c 93ed7561f39c4e37
sums of columns 71135d50823d438b 37906112a1b4efb0 b63ed5d4ba903563
masses joined 8d0d9432240f7839 e2ddec0f6d492cd6 0bc1d4c3fc846f91
sums of squares 2fc0b14655c3c07a 15ec1a1eb26e24c9 001c2a6ce6ef5942
grouped products c9625e33d23c16af a1fb7fdb93cf9950 70385fdcdbb3c117
routes, their weights and sums f64f6ff0c705d29e 83eaae4b95e57995 4d351d59d868af66
routes, their weights and sums 77046948fc9283cc 5f3cf7bc7b350fbb a18ec44a37eb1124
routes, their weights and sums 640d1eb916caca06 fd75ae0d124cf4ad 2ba062627e20ff4e
routes, their weights and sums 82613158fb2183f9 124b156afc29c4b2 daf43c358bf78281
products of integers 97b22a1ea6f85016 6cf0b58912f4e365 4b3bec0f1a21d6ce
attention to codes 091e9618b0cc11c2 681d0bfc92c2fdad ff3bcb58387daeaa
attention to codes in bfloat16 cfc2f8fc813275f2 f00a8bdc0d901c71 7dfd64f19d7388f6
norm with an offset and its gradients c9844f55f9790ea0 f86a2160971f5583 95f787270d51004c
gelu and its gradients bbfa1f6fe61fa1d1 e291eef1a52abeaa e56439732edf253d
squared relu and its gradient e9cff94fb6708c0e 3438be5dfc0b4cd5 53014d5c9672aa7a
rotation of neighbors 3b25ac2d75cc88ce 33d99c9cea02e0ad cb4c873b3a54d1fa
gate of attention and its gradients c831910f7ed0669c 7c4c30bdef7a45f3 a163f41a8397d2b8
delta rule and its gradients 789dfefb78e5639d 87b088cdf071c55a 8bd37f33816c2d79
delta rule over a cache 17621de3f6e3b7d1 8ec178261d2b9cde f92ec46a279ccda5
delta rule and its gradients aefe4986408a325f 1bfaad85cdebbbcc ecd51ea64dc7a56b
delta rule over a cache 53b54571816f1b12 3a7c478c7d50e969 e0c9e2313477e336
"""
"""The digest so far after each operator, in each arithmetic: where two differ, the first line that does names it."""


def expected(arithmetic: str) -> str:
    lines = [line.rsplit(" ", len(ARITHMETICS)) for line in EXPECTED.splitlines()]
    return "".join(f"{name} {digests[ARITHMETICS.index(arithmetic)]}\n" for name, *digests in lines)


@pytest.fixture(scope="module", autouse=True)
def form():
    """Programs of their own, which need no form of this process."""


def run_self_test(folder: Path, compiler: str, flags: list[str], kernels: list[Path], *runner: str) -> str:
    program = folder / "self_test"
    options = [flag for flag in compiling.FLAGS if flag not in ("-O3", "-fPIC")]
    # -O1: what is tested is the source's meaning, not the compiler's patience.
    subprocess.run([compiler, "-O1", *options, *flags, SELF_TEST, *kernels, "-o", program], check=True)
    return subprocess.run([*runner, program], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("sets", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_every_instruction_set_computes_the_bits_of_its_arithmetic(tmp_path, sets):
    compiler = compiling.find_compiler()
    assert compiler, "these tests need a C++ compiler: install g++"
    program = tmp_path / "self_test.o"
    subprocess.run([compiler, "-O1", "-std=c++17", "-ffp-contract=off", "-c", SELF_TEST, "-o", program], check=True)
    for instructions in sets:
        kernels = [build.library_path(instructions)]  # the very library that serves runs on these instructions
        (folder := tmp_path / instructions.name).mkdir()
        if instructions.name == "amx":  # the program asks Linux for the matrix unit
            output = run_self_test(folder, compiler, list(instructions.flags), kernels)
        else:
            subprocess.run([compiler, "-fopenmp", program, *kernels, "-o", folder / "self_test"], check=True)
            output = subprocess.run([folder / "self_test"], check=True, capture_output=True, text=True).stdout
        assert output == expected(instructions.arithmetic), instructions.name


@pytest.mark.parametrize("instructions", BY_MACHINE["aarch64"][:2], ids=lambda each: each.name)
def test_arm_computes_the_same_bits_too(tmp_path, instructions):
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if platform.machine() == "aarch64" or not (shutil.which(compiler) and shutil.which(emulator)):
        pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user")
    sources = sorted(compiling.SOURCES.glob("*.cpp"))
    output = run_self_test(tmp_path, compiler, ["-static", *instructions.flags], sources, emulator)
    assert output == expected(instructions.arithmetic)
