"""Runs that nothing disturbs, for those that something does."""

import pytest

from lockstep.config import CheckpointConfig
from tests.parallel.launch import launch
from tests.rl.generators.test_colocated import TASK, config_of, outcome, run

FAILING = """
class Failing(Vowels):
    def reward(self, example, completion):
        from lockstep.errors import UserError
        raise UserError("no reward today")
"""


@pytest.fixture
def task(tmp_path):
    """The file of the environments that runs here are given."""
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return file


def whole_run(model_folder, folder, steps):
    """The configuration of a run that saves every step, and its outcome in one process, undisturbed."""
    (folder / "task.py").write_text(TASK + FAILING)
    config = config_of(
        folder / "task.py", model_folder, folder / "run", max_new_tokens=40, steps=steps,
        checkpoint=CheckpointConfig(every=1), resume=True,
    )  # fmt: skip
    launch(1, run, config, seconds=600)
    return config, outcome(folder / "run")


@pytest.fixture(scope="session")
def whole(model_folder, tmp_path_factory):
    return whole_run(model_folder, tmp_path_factory.mktemp("whole"), steps=8)
