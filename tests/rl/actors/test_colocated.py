"""One reinforcement run in many layouts: the same rollouts token for token, and the same losses bit for bit."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from lockstep.config import (
    CheckpointConfig,
    EngineConfig,
    ParallelConfig,
    RecomputeConfig,
    RewardConfig,
    RLConfig,
    TrainConfig,
)
from lockstep.errors import UserError
from lockstep.observe import RunFolder, read_metrics
from lockstep.rl.replay import replay
from tests.parallel.launch import launch

TASK = """
import lockstep.rl as rl

WORDS = ("stone", "river", "cloud", "apple", "winter", "summer", "leaves in autumn", "x")

class Vowels(rl.Environment):
    def examples(self, split):
        for word in WORDS:
            yield rl.Example(prompt=f"{split} {word}", answer="")
    def reward(self, example, completion):
        return {"vowels": sum(c in "aeiou" for c in completion) / (1 + len(completion))}

class Unseeded(Vowels):
    def examples(self, split):
        import os
        for word in WORDS if os.environ["RANK"] == "0" else WORDS[::-1]:
            yield rl.Example(prompt=word, answer="")

class Talk(rl.ConversationEnvironment):
    def examples(self, split):
        for word in WORDS:
            yield rl.Example(prompt=word, answer="e")
    async def converse(self, example, chat):
        chat.add(example.prompt)
        first = await chat.reply()
        chat.add("once more")
        second = await chat.reply()
        return {"e": (first.text + second.text).count("e") + 0.01 * len(second.text)}
"""
ONE = ParallelConfig(reduction_chunks=2)
LAYOUTS = {
    "FSDP 2": (2, ONE),
    "DDP 2": (2, replace(ONE, data_replicate=2)),
    "TP 2": (2, replace(ONE, tensor=2)),
    "CP 2": (2, replace(ONE, context=2)),
    "PP 2": (2, replace(ONE, pipeline=2)),
    "FSDP 4": (4, ONE),
    "FSDP 2 x TP 2": (4, replace(ONE, tensor=2)),
    "CP 2 x TP 2": (4, replace(ONE, context=2, tensor=2)),
    "TP 2 x PP 2": (4, replace(ONE, tensor=2, pipeline=2)),
}
OWN = ("time", "ranks", "rollout/environment_seconds", "rollout/tokens_per_second", "pipeline/")
"""Beginnings of metrics that a layout may change."""


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return file


def config_of(task, model, output, parallel=ONE, **changes):
    train = TrainConfig(
        learning_rate=1e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=64, deterministic_layout=True
    )
    settings = dict(
        output=str(output), model=str(model), environment=f"{task}:Vowels", steps=3, prompts_per_step=5,
        samples_per_prompt=3, max_new_tokens=10, validation_examples=3, inner_steps=2, kl_coefficient=0.1,
        parallel=parallel, train=train, rewards=RewardConfig(isolate="never"),
        engine=EngineConfig(max_tokens_per_step=256, max_sequences=8, cache_tokens=2048),
    )  # fmt: skip
    return RLConfig(**(settings | changes))


def run(config):
    from lockstep.rl.controller import reinforce

    reinforce(config)


def outcome(folder):
    """What must not depend on the layout: all metrics but times, and every rollout's line."""
    metrics = [{k: v for k, v in m.items() if not k.startswith(OWN)} for m in read_metrics(folder / "metrics.jsonl")]
    return metrics, {path.name: path.read_text() for path in (folder / "rollouts").iterdir()}


def check(task, model, tmp_path, layouts, **changes):
    launch(1, run, config_of(task, model, tmp_path / "one", **changes), seconds=600)
    alone = outcome(tmp_path / "one")
    steps = alone[0][1:]
    assert [m["step"] for m in alone[0]] == list(range(len(alone[0])))
    assert all(m["parity/tokens_checked"] > 50 and m["parity/tokens_different"] == 0 for m in steps)
    # It learns from several micro-batches, so that each step's bits depend on all before it.
    assert all(m["grad_norm"] > 0.01 and m["rollout/microbatches"] > 2 for m in steps)
    assert len({m["loss"] for m in steps}) == len(steps)
    for name in layouts:
        ranks, parallel = LAYOUTS[name]
        output = tmp_path / name.replace(" ", "")
        launch(ranks, run, config_of(task, model, output, parallel, **changes), seconds=600)
        assert outcome(output) == alone, name


@pytest.mark.parametrize(
    ("dtype", "layouts", "steps"),
    [
        ("bfloat16", ["PP 2", "FSDP 2 x TP 2"], 2),
        ("float32", ["CP 2"], 2),
        pytest.param("bfloat16", LAYOUTS, 10, marks=pytest.mark.slow),
        pytest.param("float32", LAYOUTS, 10, marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_same_rollouts_and_losses_in_every_layout(task, model_folder, tmp_path, dtype, layouts, steps):
    check(task, model_folder, tmp_path, layouts, dtype=dtype, steps=steps)


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        # Their terms span completions and rounds of drawing; the average's weights travel as the policy's do.
        ("gspo", dict(kl_coefficient=0.05, kl_reference="average", off_policy="truncate")),
        ("dapo", dict(extra_rounds=1, entropy_coefficient=0.01, recompute=RecomputeConfig("full"))),
        pytest.param("reinforce++", dict(top_p=0.9, off_policy="mask"), marks=pytest.mark.slow),
        pytest.param("rejection", {}, marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_algorithm_does(task, model_folder, tmp_path, algorithm, changes):
    check(task, model_folder, tmp_path, ["CP 2 x TP 2" if algorithm == "gspo" else "FSDP 2"], algorithm=algorithm,
          steps=2, **changes)  # fmt: skip


def test_conversations_are_spread_over_ranks(task, model_folder, tmp_path):
    check(task, model_folder, tmp_path, ["FSDP 2"], environment=f"{task}:Talk", steps=2, kl_coefficient=0.0)


def test_a_run_resumes_in_another_layout_as_the_same_run(task, model_folder, tmp_path):
    launch(1, run, config_of(task, model_folder, tmp_path / "one", steps=4), seconds=300)
    saving = CheckpointConfig(every=1)
    begun = config_of(task, model_folder, tmp_path / "run", LAYOUTS["TP 2"][1], steps=2, checkpoint=saving)
    launch(2, run, begun, seconds=300)
    launch(2, run, replace(begun, parallel=LAYOUTS["FSDP 2"][1], steps=4, resume=True), seconds=300)
    found, alone = outcome(tmp_path / "run"), outcome(tmp_path / "one")
    del found[1]["validation_00000002.jsonl"]  # the run had come to its end there
    found[0][2] = {k: v for k, v in found[0][2].items() if not k.startswith("validation/")}
    assert found == alone


def test_a_step_of_several_ranks_is_computed_again_in_one_process(task, model_folder, tmp_path):
    config = config_of(task, model_folder, tmp_path / "run", LAYOUTS["TP 2"][1], checkpoint=CheckpointConfig(every=1))
    launch(2, run, config)
    again = replay(tmp_path / "run", 2)
    assert again.equal, again.text()
    launch(2, run, replace(config, output=str(tmp_path / "other"), train=TrainConfig(), steps=1))
    with pytest.raises(UserError, match="was made on 2 ranks, which add up gradients in another order"):
        replay(tmp_path / "other", 1)


def test_without_one_order_ranks_agree_with_one_process_in_every_token_and_nearly_in_the_loss(
    task, model_folder, tmp_path
):
    train = TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=512)
    first = config_of(task, model_folder, tmp_path / "one", train=train, steps=1, inner_steps=1, dtype="float32")
    launch(1, run, first)
    launch(2, run, replace(first, output=str(tmp_path / "two"), parallel=ParallelConfig()))
    alone, both = (read_metrics(tmp_path / name / "metrics.jsonl")[1] for name in ("one", "two"))
    assert both["rollout/microbatches"] == 2 > alone["rollout/microbatches"]  # none is left without work
    rollouts = [RunFolder(tmp_path / name).rollouts_path(1).read_text() for name in ("one", "two")]
    assert [json.loads(line)["token_ids"] for line in rollouts[0].splitlines()] == [
        json.loads(line)["token_ids"] for line in rollouts[1].splitlines()
    ]
    # float32 sums in another order: some units in the last of 24 bits.
    assert both["parity/tokens_different"] == 0 and math.isclose(both["loss"], alone["loss"], rel_tol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            dict(algorithm="ppo", kl_coefficient=0.0),
            "algorithm ppo trains a value head, which is in one process so far",
        ),
        (dict(environment="Talk", parallel=ParallelConfig(tensor=2)), "whose ranks cannot share a generator so far"),
        (dict(environment="Unseeded"), 'examples of "train" on rank 1 are not those of rank 0'),
        (dict(parallel=ParallelConfig(pipeline=4)), "= 4 ranks, but 2 run; start 4 with torchrun"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(task, model_folder, tmp_path, changes, said):
    if "environment" in changes:
        changes = changes | {"environment": f"{task}:{changes['environment']}"}
    if changes.get("algorithm") == "ppo":
        changes = changes | {"train": TrainConfig()}
    config = config_of(task, model_folder, tmp_path / "run", **{"parallel": ParallelConfig(), **changes})
    for message in launch(2, refused, config):
        assert said in message
    assert not (tmp_path / "run").exists()


def refused(config):
    try:
        run(config)
    except UserError as error:
        return str(error)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_a_run_under_torchrun_that_is_killed_goes_on_bit_for_bit(task, model_folder, tmp_path):
    def command(name):
        return [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m",
            "lockstep", "rl",
            "--model", str(model_folder), "--environment", f"{task}:Vowels", "--output", str(tmp_path / name),
            "--steps", "4", "--prompts-per-step", "4", "--samples-per-prompt", "3", "--max-new-tokens", "10",
            "--validation-examples", "3", "--train.deterministic-layout", "--train.tokens-per-microbatch", "64",
            "--checkpoint.every", "1", "--engine.cache-tokens", "2048", "--resume",
        ]  # fmt: skip

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command("whole"), env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "next:   lockstep generate" in done.stdout and done.stdout.count("next:") == 1  # one rank speaks
    killed = subprocess.Popen(command("killed"), env=environment, start_new_session=True)
    while not (tmp_path / "killed" / "checkpoints" / "step_00000002" / "manifest.json").is_file():
        assert killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    done = subprocess.run(command("killed"), env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
