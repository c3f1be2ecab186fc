"""Generators in processes of their own: the same run as in one process, whatever happens to them."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from lockstep.config import ActorsConfig, CheckpointConfig, RanksConfig, RewardConfig
from lockstep.errors import UserError
from lockstep.observe import RunFolder, read_metrics
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.replay import replay
from lockstep.rl.rollouts.prompt_balance import PromptBalance, prompt_balance
from lockstep.rl.rollouts.prompts import PromptLoader, examples_of
from lockstep.rl.rollouts.recorded import read_lines
from tests.parallel.launch import CONTEXT, free_port, launch
from tests.rl.generators.test_colocated import LAYOUTS, ONE, TASK, config_of, outcome, run
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
FAST = ("two", "TP 2")
"""Of these the others are parts."""


@pytest.fixture(scope="module")
def alone(model_folder, tmp_path_factory):
    """What comes of the run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "task.py").write_text(TASK)
    launch(1, run, config_of(folder / "task.py", model_folder, folder / "run"), seconds=300)
    return outcome(folder / "run")


def test_a_run_that_nobody_joins_says_how_to(task, model_folder, tmp_path):
    config = config_of(task, model_folder, tmp_path / "run", actors=ActorsConfig(port=free_port(), start_seconds=0.5))
    joining = rf"start one while .*lockstep generator --trainer 127.0.0.1:{config.actors.port} --key {tmp_path}"
    with pytest.raises(UserError, match=joining):
        run(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", FAST)
def test_a_run_is_the_same_with_separate_generators(task, model_folder, tmp_path, way, alone):
    ranks, parallel, actors = WAYS[way]
    launch(ranks, run, config_of(task, model_folder, tmp_path / "run", parallel, actors=actors), seconds=300)
    assert outcome(tmp_path / "run") == alone


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ten_steps_are_the_same_with_separate_generators_of_every_kind(task, model_folder, tmp_path, dtype):
    launch(1, run, config_of(task, model_folder, tmp_path / "alone", dtype=dtype, steps=10), seconds=600)
    expected = outcome(tmp_path / "alone")
    assert len(expected[0]) == 11
    for way, (ranks, parallel, actors) in WAYS.items():
        output = tmp_path / way.replace(" ", "")
        config = config_of(task, model_folder, output, parallel, actors=actors, dtype=dtype, steps=10)
        launch(ranks, run, config, seconds=600)
        assert outcome(output) == expected, way


@pytest.mark.slow
def test_conversations_with_separate_generators_are_the_same_though_trainers_share_the_model(
    task, model_folder, tmp_path
):
    changes = dict(environment=f"{task}:Talk", steps=2, kl_coefficient=0.0)
    launch(1, run, config_of(task, model_folder, tmp_path / "one", **changes), seconds=300)
    ranks, parallel = LAYOUTS["TP 2"]
    actors = ActorsConfig(generators=2, threads=1)
    launch(ranks, run, config_of(task, model_folder, tmp_path / "run", parallel, actors=actors, **changes), seconds=300)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP 2", "HSDP 4"])
def test_a_value_function_is_trained_on_ranks_with_separate_generators(task, model_folder, tmp_path, layout):
    changes = dict(algorithm="ppo", steps=3)
    launch(1, run, config_of(task, model_folder, tmp_path / "one", **changes), seconds=300)
    ranks, parallel = LAYOUTS[layout]
    actors = ActorsConfig(generators=1, threads=1)
    launch(ranks, run, config_of(task, model_folder, tmp_path / "run", parallel, actors=actors, **changes), seconds=300)
    found = outcome(tmp_path / "run")
    assert found == outcome(tmp_path / "one")
    assert len({metrics["value/loss"] for metrics in found[0][1:]}) == 3  # of values that move with the weights


# Servers as the runs of `config_of` need them.
SERVED = dict(admin_key="secret", parallel=RanksConfig(reduction_chunks=ONE.reduction_chunks))


def _run_with_key(config):
    os.environ["LOCKSTEP_ADMIN_KEY"] = SERVED["admin_key"]
    run(config)


@pytest.mark.slow
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


def _start(config):
    process = CONTEXT.Process(target=_run_with_key, args=(config,), daemon=False)
    process.start()
    return process


def _killed_at_random(config, kills, draw):
    """Starts and ends a run, some steps and a moment after it was started, and then lets it come to its end.

    The first kill and every second one is SIGKILL, of its generators too; the others are SIGINT.
    """
    folder = Path(config.output)

    def done():
        return len(read_metrics(folder / "metrics.jsonl")) if (folder / "metrics.jsonl").is_file() else 0

    for kill in range(kills):
        until = done() + draw.randint(1, 3)
        process = _start(config)
        while done() < until and process.is_alive():
            time.sleep(0.005)
        time.sleep(draw.random() * 0.2)
        children = _children_of(process.pid)
        if kill % 2:
            os.kill(process.pid, signal.SIGINT)
            process.join(60)
            assert process.exitcode is not None
            until = time.monotonic() + 10
            while any(Path(f"/proc/{child}").exists() for child in children):
                assert time.monotonic() < until
                time.sleep(0.01)
        else:
            for each in (process.pid, *children):
                with contextlib.suppress(ProcessLookupError):  # it may have ended
                    os.kill(each, signal.SIGKILL)
            process.join()
    process = _start(config)
    process.join(300)
    assert process.exitcode == 0


def _children_of(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _prompts_of_steps(folder, steps):
    files = [RunFolder(folder).rollouts_path(step) for step in range(1, steps + 1)]
    return [list(dict.fromkeys((r["group"], r["prompt"]) for r in read_lines(file))) for file in files]


def _every_prompt_was_trained_on_once(folder, task, config):
    loader = PromptLoader(examples_of(load_environment(f"{task}:Many"), "train"), config.seed)
    count = config.prompts_per_step
    expected = [list(enumerate(e.prompt for e in loader.next(count))) for _ in range(config.steps)]
    assert _prompts_of_steps(folder, config.steps) == expected
    balance = prompt_balance(folder)
    assert balance == PromptBalance(config.steps * count, config.steps * count, {}, 0, 0, 0)
    assert json.loads((folder / "summary.json").read_text())["prompts"] == dataclasses.asdict(balance)
    steps = read_metrics(folder / "metrics.jsonl")[1:]
    assert all(m["parity/tokens_different"] == 0 for m in steps)
    assert max(m["policy/staleness_max"] for m in steps) == config.actors.max_staleness


def _prefetcher(task, model_folder, output, steps, actors):
    return config_of(
        task, model_folder, output, environment=f"{task}:Many", steps=steps, actors=actors, resume=True,
        updates_per_batch=1, checkpoint=CheckpointConfig(every=1, keep_last=4), kl_coefficient=0.0,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_that_samples_ahead_is_killed_and_resumed_and_asks_every_prompt_once(task, model_folder, tmp_path):
    with running_server(model_folder, **SERVED) as server:
        actors = ActorsConfig(urls=(server.url,), max_staleness=2)
        config = _prefetcher(task, model_folder, tmp_path / "run", 7, actors)
        _killed_at_random(config, 2, random.Random(3))
    _every_prompt_was_trained_on_once(tmp_path / "run", task, config)


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["continue", "finish"])
def test_a_run_with_generators_of_its_own_is_killed_again_and_again(task, model_folder, tmp_path, on_update):
    actors = ActorsConfig(generators=2, threads=1, max_staleness=2, on_update=on_update)
    config = _prefetcher(task, model_folder, tmp_path / "run", 10, actors)
    _killed_at_random(config, 3, random.Random(on_update))
    _every_prompt_was_trained_on_once(tmp_path / "run", task, config)
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
def test_whatever_is_trained_with_steps_that_were_sampled_ahead_keeps_the_promise(task, model_folder, tmp_path, way):
    ranks, changes = AHEAD[way]
    environment = f"{task}:{changes.get('environment', 'Many')}"
    with running_server(model_folder, **SERVED) as server:
        actors = ActorsConfig(urls=(server.url,), max_staleness=1)
        config = _prefetcher(task, model_folder, tmp_path / "run", 5, actors)
        config = dataclasses.replace(config, **(changes | dict(environment=environment)))
        launch(ranks, _run_with_key, config, seconds=300)
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
