"""Every promise of PROMISES.md has a test, and the test fails once the fault beside it is planted."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Promise(NamedTuple):
    promise: str
    test: str
    file: str
    code: str
    fault: str


def read_promises():
    rows = [line for line in (ROOT / "tests/PROMISES.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]
    return [Promise(*each) for each in cells if each[0] not in ("Promise", "---")]


PROMISES = read_promises()


def test_every_promise_has_a_test_and_a_fault_that_can_be_planted():
    for promise in PROMISES:
        file, _, name = promise.test.partition("::")
        defined = [getattr(node, "name", "") for node in ast.walk(ast.parse((ROOT / file).read_text()))]
        assert name.partition("[")[0] in defined, promise
        assert (ROOT / promise.file).read_text().count(promise.code) == 1 and promise.fault != promise.code, promise
    assert len(PROMISES) > 100


@pytest.mark.slow
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.promise)
def test_the_test_of_a_promise_finds_the_planted_fault(promise, tmp_path):
    for part in ("lockstep", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", ".environments"))
    for part in ("docs", "examples", "benchmarks", "pyproject.toml", "README.md"):
        (tmp_path / part).symlink_to(ROOT / part)
    file = tmp_path / promise.file
    file.write_text(file.read_text().replace(promise.code, promise.fault))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow", promise.test],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert tested.returncode == pytest.ExitCode.TESTS_FAILED, tested.stdout[-3000:]
