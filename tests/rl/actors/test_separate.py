"""Generators in processes of their own: the same run as in one process, whatever happens to them."""

import os

import pytest

from lockstep.config import ActorsConfig, RanksConfig
from tests.parallel.launch import launch
from tests.rl.actors.test_colocated import LAYOUTS, ONE, TASK, config_of, outcome, run
from tests.server.conftest import running_server


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return file


WAYS = {
    "two": (1, ONE, ActorsConfig(generators=2, threads=1)),
    "TP 2": (1, ONE, ActorsConfig(generators=1, tensor=2, threads=1)),
    "one for FSDP 2": (2, ONE, ActorsConfig(generators=1, threads=1)),
}


@pytest.fixture(scope="module")
def alone(model_folder, tmp_path_factory):
    """What comes of the run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "task.py").write_text(TASK)
    launch(1, run, config_of(folder / "task.py", model_folder, folder / "run"), seconds=300)
    return outcome(folder / "run")


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_the_same_with_separate_generators(task, model_folder, tmp_path, way, alone):
    ranks, parallel, actors = WAYS[way]
    launch(ranks, run, config_of(task, model_folder, tmp_path / "run", parallel, actors=actors), seconds=300)
    assert outcome(tmp_path / "run") == alone


def test_conversations_with_separate_generators_are_the_same_though_trainers_share_the_model(
    task, model_folder, tmp_path
):
    changes = dict(environment=f"{task}:Talk", steps=2, kl_coefficient=0.0)
    launch(1, run, config_of(task, model_folder, tmp_path / "one", **changes), seconds=300)
    ranks, parallel = LAYOUTS["TP 2"]
    actors = ActorsConfig(generators=2, threads=1)
    launch(ranks, run, config_of(task, model_folder, tmp_path / "run", parallel, actors=actors, **changes), seconds=300)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "one")


# Servers as the runs of `config_of` need them.
SERVED = dict(admin_key="secret", parallel=RanksConfig(reduction_chunks=ONE.reduction_chunks))


def _run_with_key(config):
    os.environ["LOCKSTEP_ADMIN_KEY"] = SERVED["admin_key"]
    run(config)


@pytest.mark.parametrize("way", ["one", "FSDP 2"])
def test_a_run_is_the_same_with_generators_behind_http(task, model_folder, tmp_path, way):
    launch(1, run, config_of(task, model_folder, tmp_path / "one", top_p=0.9), seconds=300)
    with running_server(model_folder, **SERVED) as one, running_server(model_folder, **SERVED) as two:
        ranks, parallel = LAYOUTS["FSDP 2"] if way == "FSDP 2" else (1, ONE)
        config = config_of(task, model_folder, tmp_path / "run", parallel, top_p=0.9)
        config.actors.urls = (one.url, two.url)
        launch(ranks, _run_with_key, config, seconds=300)
        assert min(server.engine.statistics.tokens_sampled for server in (one, two)) > 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "one")
    assert not (tmp_path / "run" / "weights").exists()


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
