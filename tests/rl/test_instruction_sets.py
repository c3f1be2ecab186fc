"""Trainer against generator as on other machines than this one: lower instruction sets, ours and the libraries'."""

import os
import subprocess
import sys

import pytest

from lockstep.ops.native.instruction_sets import supported
from tests.rl.test_digest import ROOT

LIBRARIES = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"}
LOWER = [each.name for each in supported()][1:]
PARITY = "tests/rl/scoring/test_parity.py"


def run_tests_with(name, folder, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder), *arguments]
    # It is no worker of the tests that run here, which have one thread each.
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment = own | LIBRARIES | {"LOCKSTEP_ISA": name, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]


def test_trainer_and_generator_agree_with_narrower_vectors(tmp_path):
    """The runs of `test_digest`, which compare every token too, are of this processor's own and of the lowest set."""
    if "avx2" not in LOWER:
        pytest.skip("this processor has nothing above AVX2")
    run_tests_with("avx2", tmp_path, "-m", "slow or not slow", "-k", "agree", PARITY)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOWER)
def test_engine_and_parity_hold_on_every_lower_instruction_set(name, tmp_path):
    """Their whole files but for slow tests, as on a machine that has no more."""
    files = "tests/generate/test_engine.py", PARITY, "tests/ops/test_linear.py"
    run_tests_with(name, tmp_path, *files)
