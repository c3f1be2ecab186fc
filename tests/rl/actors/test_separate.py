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


def test_steps_sampled_ahead_are_as_old_as_allowed_and_the_run_does_not_depend_on_who_was_how_fast(
    task, model_folder, tmp_path
):
    for name in ("one", "two"):
        actors = ActorsConfig(generators=int(name == "two") + 1, threads=1, max_staleness=1, on_update="finish")
        config = config_of(task, model_folder, tmp_path / name, actors=actors, steps=4, off_policy="truncate")
        launch(1, run, config, seconds=300)
    one, two = outcome(tmp_path / "one"), outcome(tmp_path / "two")
    assert one == two
    steps = one[0][1:]
    assert [m["policy/staleness_max"] for m in steps] == [0, 1, 1, 1]
    # What is stale has no counterpart to compare with, and what is not has the very bits.
    assert [m["parity/tokens_checked"] > 50 for m in steps] == [True, False, False, False]
    assert all(m["parity/tokens_different"] == 0 for m in steps)
