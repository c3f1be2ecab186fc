"""Generators in processes of their own: the same run as in one process, whatever happens to them."""

import pytest

from lockstep.config import ActorsConfig
from tests.parallel.launch import launch
from tests.rl.actors.test_colocated import LAYOUTS, ONE, TASK, config_of, outcome, run


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return file


WAYS = {
    "one": (1, ONE, ActorsConfig(generators=1, threads=1)),
    "two": (1, ONE, ActorsConfig(generators=2, threads=1)),
    "TP 2": (1, ONE, ActorsConfig(generators=1, tensor=2, threads=1)),
    "one for FSDP 2": (2, ONE, ActorsConfig(generators=1, threads=1)),
    "two for TP 2": (*LAYOUTS["TP 2"], ActorsConfig(generators=2, threads=1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_the_same_with_separate_generators(task, model_folder, tmp_path, way):
    launch(1, run, config_of(task, model_folder, tmp_path / "one"), seconds=300)
    ranks, parallel, actors = WAYS[way]
    launch(ranks, run, config_of(task, model_folder, tmp_path / "run", parallel, actors=actors), seconds=300)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "one")
