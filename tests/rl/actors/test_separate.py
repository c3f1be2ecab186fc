"""Generators in processes of their own: the same run as in one process, whatever happens to them."""

import pytest

from lockstep.config import ActorsConfig
from tests.parallel.launch import launch
from tests.rl.actors.test_colocated import LAYOUTS, ONE, TASK, config_of, outcome, run
from tests.server.conftest import running_server


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


@pytest.mark.parametrize("way", ["one", "FSDP 2"])
def test_a_run_is_the_same_with_generators_behind_http(task, model_folder, tmp_path, way, monkeypatch):
    launch(1, run, config_of(task, model_folder, tmp_path / "one", top_p=0.9), seconds=300)
    monkeypatch.setenv("LOCKSTEP_ADMIN_KEY", "secret")
    with (
        running_server(model_folder, admin_key="secret") as one,
        running_server(model_folder, admin_key="secret") as two,
    ):
        ranks, parallel = LAYOUTS["FSDP 2"] if way == "FSDP 2" else (1, ONE)
        changes = dict(top_p=0.9, actors=ActorsConfig(urls=[one.url, two.url]))
        launch(ranks, run, config_of(task, model_folder, tmp_path / "run", parallel, **changes), seconds=300)
        assert min(server.engine.statistics.tokens_sampled for server in (one, two)) > 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "one")
    assert not (tmp_path / "run" / "weights").exists()
