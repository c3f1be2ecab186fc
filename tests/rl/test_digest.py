"""Same seed, same run: one digest in fresh processes, whatever the threads and the instruction set."""

import os

import pytest

from lockstep.ops.native.instruction_sets import supported
from tests.rl.digest import digests_of_a_process

EXPECTED = {
    "pretrain": "9a53a00103950c8bcfc5bceeab938afef2bf116c69fb8f7d1b5126a935ca6b66",
    "rl": "3908e942aa36611ea676bd3ecccf2863cf0465d826226d1e237b14360c96ca7b",
    "rollouts": "67ba4ecbfc8ef145763760f64cc58888c4f1f48a98f0367888edf74e4999eb79",
}
"""Of every processor, compiler and number of threads. What changes a bit of a float32 run changes it."""

LOWEST = supported()[-1].name
VARIATIONS = {
    "own": {"OMP_NUM_THREADS": "2"},
    # Plain vectors of torch's own operators too: whatever of a library depends on the width of a vector shows here.
    "lowest": {"OMP_NUM_THREADS": "1", "LOCKSTEP_ISA": LOWEST, "ATEN_CPU_CAPABILITY": "default"},
    "lowered library": {"OMP_NUM_THREADS": "2", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_run_in_float32_is_the_same_run_everywhere(tmp_path, name):
    assert digests_of_a_process(tmp_path, **VARIATIONS[name]) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("index", range(40))
def test_forty_processes_beside_other_work_are_one_run(tmp_path, index, busy_neighbour):
    assert digests_of_a_process(tmp_path, OMP_NUM_THREADS=str(1 + index % 3)) == EXPECTED


@pytest.fixture(scope="module")
def busy_neighbour():
    """Another process on one of the cores."""
    import subprocess
    import sys

    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], env=os.environ)
    yield
    process.kill()
    process.wait()
