"""Runs that nothing disturbs, for those that something does."""

from dataclasses import replace

import pytest

from lockstep.config import ActorsConfig, CheckpointConfig
from tests.parallel.launch import launch
from tests.rl.generators.disturbed import Disturbed
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


@pytest.fixture
def disturbed(whole, tmp_path):
    """`disturbed(until, **actors)`: that run with such generators in a process of its own, which waits after the step
    `until`, and the outcome that it must have."""

    def start(until=10**6, stall="", environment="Vowels", **actors):
        config, expected = whole
        environment = config.environment.replace("Vowels", environment)
        actors = ActorsConfig(threads=1, **actors)
        config = replace(config, output=str(tmp_path / "run"), environment=environment, actors=actors)
        return Disturbed(config, until, stall), expected

    return start
