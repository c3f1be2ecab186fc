"""Runs that ask more prompts than they train on: which are kept, what becomes of the others, and the same run anew."""

import json
from dataclasses import replace

import pytest

from lockstep.config import ActorsConfig, CheckpointConfig, RLConfig
from lockstep.errors import UserError
from lockstep.observe import read_metrics
from lockstep.rl.reinforce import reinforce
from lockstep.rl.replay import replay
from lockstep.rl.rollouts.prompt_balance import prompt_balance
from tests.parallel.launch import launch
from tests.rl.generators.test_colocated import LAYOUTS, TASK, config_of, outcome, refused, run

SHORT_AND_LONG = """
class Stopping(Vowels):
    stop = ("e", "a", "s", "t", " ", "0", "1")

class StoppingTalk(Talk):
    stop = Stopping.stop
"""


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK + SHORT_AND_LONG)
    return file


def oversampling(task, model, output, *arguments, environment="Stopping", **changes):
    """Of six prompts, four are trained on. The longest completions have many times the tokens of the others."""
    settings = dict(
        prompts_per_step=4, oversampling_factor=1.5, max_new_tokens=80, kl_coefficient=0.0, updates_per_batch=1
    )
    settings |= dict(environment=f"{task}:{environment}", checkpoint=CheckpointConfig(every=1))
    return config_of(task, model, output, *arguments, **(settings | changes))


@pytest.mark.slow
def test_a_run_trains_on_the_first_groups_and_is_the_same_when_it_is_resumed_and_computed_again(
    task, model_folder, tmp_path
):
    config = oversampling(task, model_folder, tmp_path / "whole", extra_rounds=1, algorithm="dapo")
    reinforce(config)
    steps = read_metrics(tmp_path / "whole" / "metrics.jsonl")[1:]
    for metrics in steps:
        assert metrics["groups/dropped/stragglers"] >= 2 and metrics["parity/tokens_different"] == 0
        dropped = sum(count for name, count in metrics.items() if name.startswith("groups/dropped/"))
        assert metrics["groups/drawn"] == metrics["groups/trained"] + dropped
    balance = prompt_balance(tmp_path / "whole")
    assert (balance.repeated, balance.lost, balance.in_flight) == (0, 0, 0)
    assert balance.asked == sum(m["groups/drawn"] for m in steps) >= 18
    assert balance.dropped["stragglers"] == sum(m["groups/dropped/stragglers"] for m in steps)
    for sample in (False, True):
        again = replay(tmp_path / "whole", 2, sample=sample)
        assert again.equal, again.text()
    begun = replace(config, output=str(tmp_path / "resumed"), steps=1)
    reinforce(begun)
    reinforce(replace(begun, steps=3, resume=True))
    (found, files), (expected, wanted) = outcome(tmp_path / "resumed"), outcome(tmp_path / "whole")
    del files["validation_00000001.jsonl"]  # the run had come to its end there
    found[1] = {name: value for name, value in found[1].items() if not name.startswith("validation/")}
    assert files == wanted and found == expected
    prompts = [(tmp_path / name / "prompts.jsonl").read_text() for name in ("whole", "resumed")]
    assert prompts[0] == prompts[1] and all(json.loads(line)["dropped"] for line in prompts[0].splitlines())


SEPARATE = dict(actors=ActorsConfig(generators=2, threads=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "environment", "changes"),
    [(1, "Stopping", SEPARATE), (1, "StoppingTalk", SEPARATE), (2, "Stopping", dict(parallel=LAYOUTS["TP 2"][1]))],
    ids=["generators", "conversations of generators", "TP 2"],
)
def test_generators_and_tensor_ranks_leave_the_same_groups_as_one_process(
    task, model_folder, tmp_path, ranks, environment, changes
):
    config = oversampling(task, model_folder, tmp_path / "one", environment=environment, steps=2)
    reinforce(config)
    launch(ranks, run, replace(config, output=str(tmp_path / "two"), **changes), seconds=300)
    assert outcome(tmp_path / "two") == outcome(tmp_path / "one")


def test_ranks_that_sample_by_themselves_leave_the_first_of_each_and_promise_no_more(task, model_folder, tmp_path):
    config = oversampling(task, model_folder, tmp_path / "run", LAYOUTS["FSDP 2"][1], steps=2)
    for said in launch(2, refused, config):
        assert "oversampling_factor 1.5 takes the first groups of each rank" in said and "use actors.generators" in said
    train = replace(config.train, deterministic_layout=False)
    launch(2, run, replace(config, train=train, prompts_per_step=3, oversampling_factor=4 / 3), seconds=300)
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    assert [(m["groups/trained"], m["groups/dropped/stragglers"]) for m in steps] == [(3, 1), (3, 1)]
    assert prompt_balance(tmp_path / "run").lost == 0


def test_a_factor_below_one_is_refused_by_name():
    with pytest.raises(UserError, match="oversampling_factor"):
        reinforce(RLConfig(model="x", oversampling_factor=0.5))
