"""Generators in processes of their own: the same run as in one process, whatever happens to them."""

import dataclasses
import json
import os
import signal

import pytest

from lockstep.config import ActorsConfig, CheckpointConfig, PrecisionConfig, RanksConfig, RewardConfig
from lockstep.errors import UserError
from lockstep.observe import RunFolder, read_metrics
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.replay import replay
from lockstep.rl.rollouts.prompt_balance import PromptBalance, prompt_balance
from lockstep.rl.rollouts.prompts import PromptLoader, examples_of
from lockstep.rl.rollouts.recorded import read_lines
from tests.parallel.launch import free_port, launch
from tests.rl.generators.disturbed import Disturbed
from tests.rl.generators.test_colocated import LAYOUTS, ONE, config_of, outcome, run
from tests.rl.generators.test_soak import actors_of, soak
from tests.server.conftest import running_server

WAYS = {
    "TP 2": (1, ONE, ActorsConfig(generators=1, tensor=2, threads=1)),
    "two": (1, ONE, ActorsConfig(generators=2, threads=1)),
    "one for FSDP 2": (2, ONE, ActorsConfig(generators=1, threads=1)),
    "two for TP 2": (*LAYOUTS["TP 2"], ActorsConfig(generators=2, threads=1)),
}


def test_a_run_that_no_generator_joins_says_how_to_start_one(task, model_folder, tmp_path):
    config = config_of(task, model_folder, tmp_path / "run", actors=ActorsConfig(port=free_port(), start_seconds=0.2))
    joining = rf"start one while .*lockstep generator --trainer 127.0.0.1:{config.actors.port} --key {tmp_path}"
    with pytest.raises(UserError, match=joining):
        run(config)
    assert not (tmp_path / "run").exists()


def test_a_signal_before_the_first_generator_has_joined_leaves_no_folder(task, model_folder, tmp_path):
    run = Disturbed(config_of(task, model_folder, tmp_path / "run", actors=ActorsConfig(port=free_port())))
    run.wait((run.folder / "logs" / "generators.key").is_file)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() != 0 and not run.folder.exists()
    assert "SIGTERM ended the run as it started" in run.said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "settings"),
    [
        (WAYS, dict(steps=10, dtype="bfloat16")),
        (WAYS, dict(steps=3, dtype="float32")),
        (["two for TP 2"], dict(steps=2, environment="Talk", kl_coefficient=0.0)),
        # Its value function is trained on ranks that do not sample.
        (["one for FSDP 2"], dict(steps=3, algorithm="ppo")),
        (["one for FSDP 2"], dict(steps=3, precision=PrecisionConfig("int8", keep=("layers.0.*",)))),
    ],
)
def test_a_run_is_the_same_with_separate_generators(task, model_folder, tmp_path, ways, settings):
    launch(1, run, config_of(task, model_folder, tmp_path / "alone", **settings), seconds=600)
    expected = outcome(tmp_path / "alone")
    if "algorithm" in settings:
        assert len({metrics["value/loss"] for metrics in expected[0][1:]}) == 3  # its values move with the weights
    for way in ways:
        ranks, parallel, actors = WAYS[way]
        config = config_of(task, model_folder, tmp_path / way, parallel, actors=actors, **settings)
        launch(ranks, run, config, seconds=600)
        assert outcome(tmp_path / way) == expected, way


# Servers as the runs of `config_of` need them.
SERVED = dict(admin_key="secret", parallel=RanksConfig(reduction_chunks=ONE.reduction_chunks))


def run_with_key(config):
    os.environ["LOCKSTEP_ADMIN_KEY"] = SERVED["admin_key"]
    run(config)


@pytest.mark.slow
def test_a_run_is_the_same_with_generators_behind_http(task, model_folder, tmp_path):
    launch(1, run, config_of(task, model_folder, tmp_path / "one", top_p=0.9), seconds=300)
    with running_server(model_folder, **SERVED) as one, running_server(model_folder, **SERVED) as two:
        ranks, parallel = LAYOUTS["FSDP 2"]
        config = config_of(task, model_folder, tmp_path / "run", parallel, top_p=0.9)
        config.actors.urls = (one.url, two.url)
        launch(ranks, run_with_key, config, seconds=300)
        assert min(server.engine.statistics.tokens_sampled for server in (one, two)) > 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "one")
    assert not (tmp_path / "run" / "weights").exists()


def check_every_prompt_was_trained_on_once(folder, task, config):
    loader = PromptLoader(examples_of(load_environment(f"{task}:Many"), "train"), config.seed)
    count = config.prompts_per_step
    expected = [list(enumerate(e.prompt for e in loader.next(count))) for _ in range(config.steps)]
    files = [RunFolder(folder).rollouts_path(step) for step in range(1, config.steps + 1)]
    assert [list(dict.fromkeys((r["group"], r["prompt"]) for r in read_lines(file))) for file in files] == expected
    balance = prompt_balance(folder)
    assert balance == PromptBalance(config.steps * count, config.steps * count, {}, 0, 0, 0)
    assert json.loads((folder / "summary.json").read_text())["prompts"] == dataclasses.asdict(balance)
    steps = read_metrics(folder / "metrics.jsonl")[1:]
    assert all(m["parity/tokens_different"] == 0 for m in steps)
    assert max(m["policy/staleness_max"] for m in steps) == config.actors.max_staleness


def config_ahead(task, model_folder, output, steps, actors):
    return config_of(
        task, model_folder, output, environment="Many", steps=steps, actors=actors, resume=True,
        updates_per_batch=1, checkpoint=CheckpointConfig(every=1, keep_last=4), kl_coefficient=0.0,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["continue", "finish"])
def test_a_run_that_samples_ahead_and_is_killed_trains_on_every_prompt_once(task, model_folder, tmp_path, on_update):
    actors = ActorsConfig(generators=2, threads=1, max_staleness=2, on_update=on_update)
    config = config_ahead(task, model_folder, tmp_path / "run", 10, actors)
    if on_update == "finish":  # which does not have the same bits if a generator is lost
        soak(config, ["trainer"], strikes=2, at_once=1, seed=3)
    else:
        soak(config, actors_of(config), strikes=3, at_once=2, seed=3)
    check_every_prompt_was_trained_on_once(tmp_path / "run", task, config)
    if on_update == "finish":
        whole = dataclasses.replace(config, output=str(tmp_path / "whole"))
        launch(1, run, whole, seconds=300)
        assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


AHEAD = {
    "conversations": (1, dict(environment="Talk")),
    "conversations in workers": (1, dict(environment="Talk", rewards=RewardConfig(workers=1))),
    "rounds": (1, dict(algorithm="dapo", extra_rounds=2)),
    "PPO": (1, dict(algorithm="ppo")),
    "a reference": (1, dict(kl_coefficient=0.1, off_policy="truncate", updates_per_batch=2)),
    "FSDP 2": (2, dict(validation_every=1)),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == "rounds" else pytest.mark.slow) for way in AHEAD])
def test_steps_that_were_sampled_ahead_keep_their_promises_whatever_is_trained(task, model_folder, tmp_path, way):
    ranks, changes = AHEAD[way]
    environment = f"{task}:{changes.get('environment', 'Many')}"
    with running_server(model_folder, **SERVED) as server:
        actors = ActorsConfig(urls=(server.url,), max_staleness=1)
        config = config_ahead(task, model_folder, tmp_path / "run", 5, actors)
        config = dataclasses.replace(config, **(changes | dict(environment=environment)))
        launch(ranks, run_with_key, config, seconds=300)
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    assert max(m["policy/staleness_max"] for m in steps) == 1
    assert sum(m["parity/tokens_checked"] for m in steps) > 0
    assert all(m["parity/tokens_different"] == 0 for m in steps)
    balance = prompt_balance(tmp_path / "run")
    assert (balance.repeated, balance.lost, balance.in_flight) == (0, 0, 0)
    assert balance.asked == sum(m["groups/drawn"] for m in steps)
    for step in range(1, 6):
        for line in read_lines(RunFolder(tmp_path / "run").rollouts_path(step)):
            versions = line.get("versions", [line["version"]])
            assert step - 2 <= min(versions) == line["version"] and max(versions) <= step - 1
    if ranks == 1 and "Talk" not in environment and way != "rounds":
        for step in (3, 5):
            again = replay(tmp_path / "run", step)
            assert again.equal, again.text()
