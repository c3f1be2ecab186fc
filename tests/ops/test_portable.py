"""One digest of every kernel in each arithmetic: on all instruction sets of this processor, and on an emulated ARM."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep.ops.native import build, compiling
from lockstep.ops.native.instruction_sets import BY_MACHINE, supported

SELF_TEST = Path(__file__).with_name("self_test.cpp")
ARITHMETICS = ("portable", "bf16_pairs", "bf16_tiles")
EXPECTED = """\
product 7d84624a88a380ae 7d84624a88a380ae 7d84624a88a380ae
product across 3af808d50580c7bc 3af808d50580c7bc 3af808d50580c7bc
product in bfloat16 1a6cfbe1c8a02c7b 1a6cfbe1c8a02c7b 1a6cfbe1c8a02c7b
product b14f7d88a7a65581 b14f7d88a7a65581 b14f7d88a7a65581
product across a4d0037113bae916 a4d0037113bae916 a4d0037113bae916
product in bfloat16 e5ca14558b9843da e5ca14558b9843da e5ca14558b9843da
product 39b0eba9b901c214 39b0eba9b901c214 39b0eba9b901c214
product across 0bbd88df5b21b90d 0bbd88df5b21b90d 0bbd88df5b21b90d
product in bfloat16 98593b8caae209e7 98593b8caae209e7 10c8ca9f9ecd6e84
attention 709cb33b28139afb 709cb33b28139afb c6f1a92e1e3e6098
its log-sums f46a73a75f95cf77 f46a73a75f95cf77 ca3e1e8ea616e3ac
its gradient 43790f7c412e255b 43790f7c412e255b 5d2455fd279284a0
its gradient of keys 5ede1eb1f2531ca7 5ede1eb1f2531ca7 dd4f39c8d77c865c
norm 770ac47258e7f458 770ac47258e7f458 b4ded3ca5f356db7
activation 7c8ad0b6e53f82c7 7c8ad0b6e53f82c7 d071bf16b83d0664
rotation fd41400e510e0037 fd41400e510e0037 0014b0b8bcc01984
log-probabilities 8516cadb02914add 8516cadb02914add b14314b374370cf2
entropies 9a912d0146f723d5 9a912d0146f723d5 30be479efd0ec26e
draws 4e73fc1bb5d2a4c7 4e73fc1bb5d2a4c7 3a292b0bf2b5036c
weights of buckets ba9660ac7af583a7 ba9660ac7af583a7 5fed95feb41db9e8
cuts 9f63f53fe1ea1a7c 9f63f53fe1ea1a7c 65c5a8ce2bf80233
product in chunks 480da842a120bc0d 480da842a120bc0d ef792fc89f890492
its sums in bfloat16 40ea57a253844337 4d40c6e1a13ec817 12e272223a732cde
attention in bfloat16 f29d3551729aa79f c84b305927d7b613 b07a3003ebb0f4ae
its log-sums 20584baac74e2b1b ed02cb8824a0b537 1e80614a11e1b3c2
its gradient 23cc321219a5bc5b 383f6f00563f6b67 85de978729bd4dc6
its gradient of keys 19d659d1741db823 fb195abb7f22399f d2c93fcd2d841b9a
its gradient of values 633e5a6332fbce6b 597260da61e52efb 6f054ab0136aa3f2
attention in bfloat16 7619ae037c2cc63b dbf6945a31b25caf d808d29dc4acf3e6
its log-sums 016f489cf3c9c37b a8d22b2b8f9800b7 349e55071b51f63e
its gradient fb805b52e2185313 c82c6e7af4c44e4f 9c46205d71406f16
its gradient of keys fc2f9df008309017 507cc16b6048ad57 a5992e44e4f1ad9e
its gradient of values 65fdd5f99f1c2933 79f0c06fe0fa3acf e991e0ec15544a26
attention in a window with sinks 0109cd97f6749297 4eb40b29c253b153 20d8cb50c6436e46
its log-sums e37d29af027b2f43 b78f5de07ef385d7 af3a3a773a6c344e
its gradient 61808636763e6e1a 5c18cde4fe2a5e7e 3b87f4a64af62e33
its gradient of keys baa827cc44e23cff aaae16a0ea4bf4fb 9be0dc5a06c43c82
its gradient of sinks 034dce31bc98fbda b9b67ba91a89374e b01b1b6d22615177
attention in bfloat16 73a70f91ec8e7e24 26728a401393574b 40755341a2f84d6a
its log-sums 27c3579daa7624c4 4a0d7a69945989b2 f183f8655bc7084b
its gradient 28ef0c0d202d923e 6aca1f522a7ad3d4 343870cf79b947f4
its gradient of keys 7c649dbfdb2ed615 1b86fbb8cf59edbe 56e3bbe3a7f704d5
its gradient of values 4f88f72f90f1b34f 69473ccfde98e6e8 68d28564e19c3aef
attention in bfloat16 4eb8785efb93679f 404383e6edfa1514 9f8e5f5347ea44ab
its log-sums 8fd79b917e30877d 61ad9a96d40688e8 0ba7e28b8a3e947b
its gradient 89963ac49407c2cb f2808dcd6d94265e cdf912c057909109
its gradient of keys 3f40184d231da4c6 630409709c51cc6d a586d8d8c912f7fa
its gradient of values 0cfb5d2595773c75 a3350b0c364c56f6 8046fb5a4ccd0b9d
clamped activation 597a7fceec91aa87 afbd6d0653bd3b50 79eb7ec0e120b37f
its gradient c67a40b91bee866f 6cbaa2e4c2c4ea88 88133e46c633b767
its gradient of up 97e580a01bb62d1f efddb7a45488768c 93ed7561f39c4e37
sums of columns 71135d50823d438b 37906112a1b4efb0 b63ed5d4ba903563
masses joined 8d0d9432240f7839 e2ddec0f6d492cd6 0bc1d4c3fc846f91
sums of squares aee10fc537bba474 833afed2855b8c7b 0770dd8699215cfc
sums of squares in integers 2fc0b14655c3c07a 15ec1a1eb26e24c9 001c2a6ce6ef5942
grouped product 58fd213f55aff2e4 56064169a9b13d73 a11fd4b9001429ac
grouped product in bfloat16 68ba927c54e01c5d c9c548afe6d42abe 87a22ec0d465fc65
gradient of grouped matrices c9625e33d23c16af a1fb7fdb93cf9950 70385fdcdbb3c117
routes 9b5192c229879b24 fddd0ace944bc5db 66fff1e66c6d2f9c
their weights ee3ef700fb193680 226fff3970348917 0fecbf6c557a9548
sums of choices f64f6ff0c705d29e 83eaae4b95e57995 4d351d59d868af66
routes b4c3fd9052b757bf 376ccd0487659174 9c9a28282f6ab687
their weights 364b0b04610e6285 ead41e5428d02222 52ba947ac44f318d
sums of choices 77046948fc9283cc 5f3cf7bc7b350fbb a18ec44a37eb1124
routes c12a15deb4252c0c 754ad53bcdf8fa7b 202d64cc22c3f764
their weights 28d9b8f8e3b52827 5d67f6a243eaf600 7df6f7cd5e4abbbf
sums of choices 640d1eb916caca06 fd75ae0d124cf4ad 2ba062627e20ff4e
routes df9467594ddda526 37fbd586ac51b38d f71cf464809a0a6e
their weights c9437d26fea747cd 586640e4e83388ee 8d842bcc0b682505
sums of choices 82613158fb2183f9 124b156afc29c4b2 daf43c358bf78281
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


def test_every_instruction_set_computes_the_bits_of_its_arithmetic(tmp_path):
    compiler = compiling.find_compiler()
    assert compiler, "these tests need a C++ compiler: install g++"
    program = tmp_path / "self_test.o"
    subprocess.run([compiler, "-O1", "-std=c++17", "-ffp-contract=off", "-c", SELF_TEST, "-o", program], check=True)
    for instructions in supported():
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
