"""Same seed, same run: one digest in fresh processes, whatever the threads and the instruction set."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.ops.native.instruction_sets import supported
from tests.rl.digest import digests_of_a_process

EXPECTED = {
    "pretrain": "89431d3be430b2b06e99edba222f6e7894c71802903d96a3a16e9d0c1970c1b1",
    "narrow heads": "7a6234fe4a70d47119934b0d0d2d73acc51eb918b2ccf5319771ed9b3be98afd",
    "rl": "146e7633fe9eb68d1efc22cb663eef10cda25773687db9d73857f749e83be1eb",
    "rollouts": "1d2c2ac980458b6273b31e54fe24ad8f4bf89dcb88d19d3727ba1e1be6f86969",
}
"""Of every processor, compiler and number of threads. What changes a bit of a float32 run changes it."""

SETS = [each.name for each in supported() if not each.emulated]
VARIATIONS = [
    # Plain vectors of torch's own operators too: whatever of a library depends on the width of a vector shows here.
    {"OMP_NUM_THREADS": "1", "LOCKSTEP_ISA": SETS[-1], "ATEN_CPU_CAPABILITY": "default"},
    {"OMP_NUM_THREADS": "3", "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"OMP_NUM_THREADS": "2", "LOCKSTEP_ISA": SETS[(len(SETS) - 1) // 2]},
]


def test_processes_beside_each_other_with_other_threads_and_instruction_sets_are_one_run(tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]  # of the lowest instruction set, and of this processor's
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda folder, env: digests_of_a_process(folder, **env), folders, VARIATIONS))
    assert results == [EXPECTED] * 2


@pytest.mark.slow
def test_forty_processes_beside_other_work_are_one_run(tmp_path):
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for index in range(40):
            variation = VARIATIONS[index % 3] if index < 6 else {}
            environment = variation | {"OMP_NUM_THREADS": str(1 + index % 4)}
            digest = digests_of_a_process(tmp_path / str(index), **environment)
            assert digest == EXPECTED, f"process {index}"
    finally:
        neighbour.kill()
        neighbour.wait()
