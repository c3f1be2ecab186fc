"""One reinforcement run in many layouts: the same rollouts token for token, and the same losses bit for bit."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lockstep import build_model, save_model
from lockstep.config import (
    ActorsConfig,
    CheckpointConfig,
    CompileConfig,
    EngineConfig,
    ParallelConfig,
    RecomputeConfig,
    RewardConfig,
    RLConfig,
    TrainConfig,
)
from lockstep.errors import UserError
from lockstep.model import preset, read_config
from lockstep.observe import RunFolder, read_metrics
from lockstep.parallel.world import AXES, World
from lockstep.rl.environments.protocol import Example
from lockstep.rl.replay import replay
from lockstep.rl.rollouts.packing import microbatches, packing_of
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.shares import token_budget
from tests.faults import VARIABLE
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

class Many(Vowels):
    def examples(self, split):
        for number in range(100):
            yield rl.Example(prompt=f"{split} {number}", answer="")

class Unseeded(Vowels):
    def examples(self, split):
        import os
        for word in WORDS if os.environ["RANK"] == "0" else WORDS[::-1]:
            yield rl.Example(prompt=word, answer="")

class Killing(Vowels):
    def reward(self, example, completion):
        import os, signal
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reward(example, completion)

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
    "FSDP 3": (3, ONE),
    "FSDP 4": (4, ONE),
    "HSDP 4": (4, replace(ONE, data_replicate=2)),
    "FSDP 2 x TP 2": (4, replace(ONE, tensor=2)),
    "CP 2 x TP 2": (4, replace(ONE, context=2, tensor=2)),
    "CP 2 x TP 2, full DTensor": (4, replace(ONE, context=2, tensor=2, full_dtensor=True)),
    "TP 2 x PP 2": (4, replace(ONE, tensor=2, pipeline=2)),
}
TALK = dict(environment="Talk", validation_every=1, kl_coefficient=0.0)
"""Settings of a run on conversations."""
OWN = (
    "time", "ranks", "rollout/environment_seconds", "rollout/tokens_per_second", "pipeline/", "generators/", "buffer/",
)  # fmt: skip
"""Beginnings of metrics that a layout may change."""


def config_of(task, model, output, parallel=ONE, **changes):
    train = TrainConfig(
        learning_rate=1e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=64, deterministic_layout=True
    )
    name = changes.pop("environment", "Vowels")
    settings = dict(
        output=str(output), model=str(model), environment=name if ":" in name else f"{task}:{name}",
        steps=3, prompts_per_step=5, samples_per_prompt=3, max_new_tokens=10, validation_examples=3,
        updates_per_batch=2, kl_coefficient=0.1, parallel=parallel, train=train, rewards=RewardConfig(isolate="never"),
        engine=EngineConfig(max_tokens_per_step=256, max_sequences=8, cache_tokens=2048),
    )  # fmt: skip
    return RLConfig(**(settings | changes))


def run(config):
    from lockstep.rl.reinforce import reinforce

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
    for name, (ranks, parallel) in (layouts if isinstance(layouts, dict) else {n: LAYOUTS[n] for n in layouts}).items():
        output = tmp_path / name.replace(" ", "")
        launch(ranks, run, config_of(task, model, output, parallel, **changes), seconds=600)
        assert outcome(output) == alone, name
        last = read_metrics(output / "metrics.jsonl")[-1]
        busy = [f"generators/rank_{rank}/busy" for rank in range(0, ranks, parallel.tensor)]
        assert sorted(key for key in last if key.endswith("/busy")) == busy
        # With fewer prompts than generators the last ones have nothing to do.
        asked = min(len(busy), changes.get("prompts_per_step", 5))
        assert all(0 < last[key] <= 1 for key in busy[:asked]) and not any(last[key] for key in busy[asked:])


COPIES_DROPPED = ActorsConfig(keep_copy=False)
DAPO = dict(extra_rounds=1, entropy_coefficient=0.01, recompute=RecomputeConfig("full"), dtype="bfloat16")
"""Its terms span rounds of drawing."""


@pytest.mark.parametrize(
    ("algorithm", "changes", "layouts"),
    [
        ("dapo", DAPO, ["PP 2"]),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("dapo", DAPO, ["FSDP 2"]),
                ("grpo", dict(dtype="bfloat16", steps=10), LAYOUTS),
                ("grpo", dict(dtype="float32", steps=3), LAYOUTS),
                # The average's weights travel as the policy's do.
                ("gspo", dict(kl_coefficient=0.05, kl_reference="average", off_policy="truncate"), ["CP 2 x TP 2"]),
                ("reinforce++", dict(top_p=0.9, off_policy="mask"), ["FSDP 2"]),
                # Weights that do not add up to 1, and micro-batches that the ranks do not divide.
                ("dr_grpo", dict(prompts_per_step=3), ["FSDP 4"]),
                # Its value head is trained, and its values are spread over the ranks.
                ("ppo", {}, ["DDP 2", "TP 2", "PP 2", "CP 2"]),
                ("ppo", dict(value_detached=True), ["CP 2 x TP 2", "TP 2 x PP 2", "HSDP 4"]),
                ("ppo", dict(kl_reference="average"), ["CP 2 x TP 2, full DTensor", "FSDP 3"]),
                # Of each group one completion is trained on.
                ("rejection", dict(prompts_per_step=12), ["FSDP 2"]),
                # PPO reads the copy after sampling too; in PP 2 some weights are no copy in float32.
                *(
                    (algorithm, dict(actors=COPIES_DROPPED, dtype=dtype), layouts)
                    for algorithm, layouts in (("ppo", ["FSDP 2"]), ("grpo", ["PP 2"]))
                    for dtype in ("bfloat16", "float32")
                ),
                ("grpo", TALK | dict(rewards=RewardConfig(isolate="never")), ["FSDP 2", "TP 2"]),
                ("grpo", TALK | dict(rewards=RewardConfig(workers=1)), ["FSDP 2 x TP 2", "TP 2 x PP 2"]),
            )
        ),
    ],
)
def test_a_run_has_the_same_rollouts_and_losses_in_every_layout(
    task, model_folder, tmp_path, algorithm, changes, layouts
):
    check(task, model_folder, tmp_path, layouts, algorithm=algorithm, **({"steps": 2} | changes))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "layouts"), [("grpo", ("TP 2", "FSDP 2")), ("ppo", ("FSDP 2", "DDP 2"))])
def test_a_run_resumes_in_another_layout_as_the_same_run(task, model_folder, tmp_path, algorithm, layouts):
    launch(1, run, config_of(task, model_folder, tmp_path / "one", steps=4, algorithm=algorithm), seconds=300)
    first, then = (LAYOUTS[name][1] for name in layouts)
    settings = dict(steps=2, checkpoint=CheckpointConfig(every=1), algorithm=algorithm)
    begun = config_of(task, model_folder, tmp_path / "run", first, **settings)
    launch(2, run, begun, seconds=300)
    launch(2, run, replace(begun, parallel=then, steps=4, resume=True), seconds=300)
    found, alone = outcome(tmp_path / "run"), outcome(tmp_path / "one")
    del found[1]["validation_00000002.jsonl"]  # the run had come to its end there
    found[0][2] = {k: v for k, v in found[0][2].items() if not k.startswith("validation/")}
    assert found == alone


def parity_error_of_a_planted_difference(config):
    from lockstep import ops
    from lockstep.rl.generators import models
    from lockstep.rl.reinforce import reinforce
    from lockstep.rl.scoring.parity import ParityError

    models.refuse_unknown_operators = lambda model: None  # which would refuse the planted one
    exact = ops.silu_mul

    def differs_for_few_rows(gate, up):
        out = exact(gate, up)
        if len(out) < 12:  # a decode step's
            out[0, 0] = torch.nextafter(out[0, 0], out.new_tensor(9.0))
        return out

    ops.silu_mul = differs_for_few_rows
    try:
        reinforce(config)
    except ParityError as error:
        return str(error)


@pytest.mark.parametrize(
    ("layout", "actors", "message"),
    [
        ("TP 2", ActorsConfig(), "The first operator that differs is layer 0, silu_mul on tensor rank 0: 1 of "),
        *(
            pytest.param(layout, actors, message, marks=pytest.mark.slow)
            for layout, actors, message in (
                ("PP 2", ActorsConfig(), "The first operator that differs is layer 0, silu_mul: 1 of "),
                ("FSDP 2", COPIES_DROPPED, "the ranks that train have no whole copy of the policy"),
            )
        ),
    ],
)
def test_a_run_over_ranks_that_stops_names_the_operator_that_differs(
    task, model_folder, tmp_path, layout, actors, message
):
    ranks, parallel = LAYOUTS[layout]
    config = config_of(task, model_folder, tmp_path / "run", parallel, actors=actors, kl_coefficient=0.0)
    messages = launch(ranks, parity_error_of_a_planted_difference, config)
    assert len(set(messages)) == 1 and "step 1: " in messages[0] and message in messages[0], messages


@pytest.mark.slow
def test_a_step_of_several_ranks_is_computed_again_in_one_process(task, model_folder, tmp_path):
    config = config_of(task, model_folder, tmp_path / "run", LAYOUTS["TP 2"][1], checkpoint=CheckpointConfig(every=1))
    launch(2, run, config)
    again = replay(tmp_path / "run", 2)
    assert again.equal, again.text()
    launch(2, run, replace(config, output=str(tmp_path / "other"), train=TrainConfig(), steps=1))
    with pytest.raises(UserError, match="was computed on 2 ranks, which sum gradients in another order"):
        replay(tmp_path / "other", 1)


def written(folder, output, shape):
    """A model of this shape with the same tokenizer."""
    shutil.copytree(folder, output)
    save_model(build_model(shape, dtype="bfloat16", seed=1), output)
    return output


def deeper(folder, output):
    """The same kind of model with four layers."""
    return written(folder, output, replace(read_config(folder), num_layers=4))


def mixture(folder, output, layers=2):
    """A mixture of experts with the same tokenizer."""
    dense = read_config(folder)
    shape = preset("qwen3_moe:micro", dense.vocab_size, dense.eos_token_ids)
    return written(folder, output, replace(shape, num_layers=layers))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "detached"), [("zbv", True), ("zbv", False), ("dualpipev", True)])
def test_a_backward_in_two_halves_reaches_the_value_head(task, model_folder, tmp_path, schedule, detached):
    layouts = {schedule: (2, replace(ONE, pipeline=2, pipeline_schedule=schedule))}
    model = deeper(model_folder, tmp_path / "model")
    check(task, model, tmp_path, layouts, algorithm="ppo", value_detached=detached, steps=2)


MEASURED = [
    (2, ParallelConfig(), "ppo"),
    (4, ParallelConfig(context=2, tensor=2), "ppo"),
    (4, ParallelConfig(context=2, tensor=2, expert=2), "grpo"),
    (4, ParallelConfig(context=2, pipeline=2), "ppo"),
    (2, ParallelConfig(pipeline=2, pipeline_schedule="zbv"), "ppo"),
    (3, ParallelConfig(), "ppo"),
    (2, ParallelConfig(context=2, expert=2), "grpo"),
    (2, ParallelConfig(tensor=2), "grpo"),
    (4, ParallelConfig(tensor=4), "grpo"),  # more than key-value heads
    (4, ParallelConfig(tensor=2, full_dtensor=True), "ppo"),
    (4, ParallelConfig(expert=2), "ppo"),
    (4, ParallelConfig(expert=2, tensor=2), "grpo"),
    (4, ParallelConfig(expert=2, pipeline=2, pipeline_schedule="zbv"), "grpo"),
]


@pytest.mark.parametrize(
    ("ranks", "parallel", "algorithm"),
    [MEASURED[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in MEASURED[1:])],
)
def test_without_deterministic_layout_ranks_sample_the_same_and_measure_nearly_the_same(
    task, model_folder, tmp_path, ranks, parallel, algorithm
):
    # Over a pipeline, micro-batches of different lengths.
    tokens = 64 if parallel.pipeline > 1 else 512
    train = TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=tokens)
    layers = 4 if parallel.pipeline_schedule == "zbv" else 2  # two stages a rank
    if parallel.expert > 1:
        model_folder = mixture(model_folder, tmp_path / "model", layers)
    elif layers > 2:
        model_folder = deeper(model_folder, tmp_path / "model")
    first = config_of(
        task, model_folder, tmp_path / "one", ParallelConfig(reduction_chunks=parallel.tensor), train=train, steps=1,
        dtype="float32", off_policy="truncate", entropy_coefficient=0.01, loss_average="budget",
        algorithm=algorithm,
    )  # fmt: skip
    launch(1, run, first)
    launch(ranks, run, replace(first, output=str(tmp_path / "many"), parallel=parallel))
    alone, many = (read_metrics(tmp_path / name / "metrics.jsonl")[1] for name in ("one", "many"))
    files = [RunFolder(tmp_path / name).rollouts_path(1) for name in ("one", "many")]
    rollouts = [[json.loads(line)["token_ids"] for line in file.read_text().splitlines()] for file in files]
    assert rollouts[0] == rollouts[1]
    assert many["parity/tokens_different"] == 0 and many["parity/tokens_checked"] == alone["parity/tokens_checked"]
    if parallel.expert > 1:
        assert many["parity/routes_different"] == 0 and many["parity/routes_checked"] == many["parity/tokens_checked"]
    compared = ("policy/", "off_policy/", "value/", "grad_norm")
    for name in ["loss", *(name for name in alone if name.startswith(compared))]:
        # float32 sums in another order: some units in the last of 24 bits, of terms up to a hundred times the sum.
        assert math.isclose(many[name], alone[name], rel_tol=1e-5, abs_tol=1e-8), name


def test_a_route_that_differs_on_another_stage_is_named(task, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "another_expert_on_the_first_rank")
    model = mixture(model_folder, tmp_path / "model")
    # All but the last expert are the generator's, which the rank that compares has never seen itself.
    sides = r"layer 0 chose experts \[(.+), \d+\] in the generator, \[\1, \d+\] in the trainer"
    said = rf"different experts in the generator and the trainer; the first is token .*: {sides}"
    with pytest.raises(AssertionError, match=said):
        launch(2, run, config_of(task, model, tmp_path / "run", ParallelConfig(pipeline=2), steps=1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "algorithm"), [("FSDP 2", "grpo"), ("TP 2", "ppo")])
def test_a_compiled_run_of_ranks_has_every_bit_compared(task, model_folder, tmp_path, name, algorithm):
    ranks, parallel = LAYOUTS[name]
    settings = dict(dtype="float32", steps=1, train=TrainConfig(), algorithm=algorithm)
    changes = dict(compile=CompileConfig("inductor"), **settings)
    launch(ranks, run, config_of(task, model_folder, tmp_path / "run", parallel, **changes), seconds=300)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")[1]
    assert metrics["parity/tokens_checked"] > 50 and metrics["parity/tokens_different"] == 0


def test_every_data_parallel_rank_has_a_microbatch_though_prompts_are_long_and_shared():
    def rollouts(groups, samples, prompt, longest):
        return [
            Rollout(
                Example(str(group)), group, [group] * prompt, [1] * (1 + (7 * n + group) % longest), [], "length", "", 0
            )
            for group in range(groups)
            for n in range(samples)
        ]

    config = RLConfig(parallel=ParallelConfig())
    for shape in [(16, 8, 200, 32), (4, 8, 1000, 50), (16, 8, 8, 32), (3, 3, 40, 10), (1, 8, 300, 4)]:
        sampled = rollouts(*shape)
        for ranks in (1, 2, 3, 4, 8):
            world = World(torch.device("cpu"), dict.fromkeys(AXES, 1) | {"data_shard": ranks})
            budget = token_budget(sampled, packing_of(config), world)
            assert len(microbatches(sampled, budget)) >= ranks, (shape, ranks)
            fixed = replace(config, train=TrainConfig(deterministic_layout=True))
            assert token_budget(sampled, packing_of(fixed), world) == config.train.tokens_per_microbatch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(algorithm="ppo", train=TrainConfig(optimizer_in_backward=True, max_grad_norm=0)),
            "turn train.optimizer_in_backward off",
        ),
        (dict(environment="Unseeded"), '"train" examples on rank 1 differ from those on rank 0'),
        (
            dict(actors=ActorsConfig(keep_copy=False, generators=1)),
            "actors.keep_copy applies to ranks that both train and sample; with separate generators, remove it",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(task, model_folder, tmp_path, changes, message):
    config = config_of(task, model_folder, tmp_path / "run", **{"parallel": ParallelConfig(), **changes})
    for error in launch(2, refused, config):
        assert message in error
    assert not (tmp_path / "run").exists()


def refused(config):
    try:
        run(config)
    except UserError as error:
        return str(error)


def command(task, model_folder, output):
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m",
        "lockstep", "rl",
        "--model", str(model_folder), "--environment", task, "--output", str(output),
        "--steps", "4", "--prompts-per-step", "4", "--samples-per-prompt", "3", "--max-new-tokens", "10",
        "--validation-examples", "3", "--train.deterministic-layout", "--train.tokens-per-microbatch", "64",
        "--checkpoint.every", "1", "--engine.cache-tokens", "2048", "--resume",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_rank_that_has_lost_another_says_so_in_a_sentence(task, model_folder, tmp_path):
    killing = [*command(f"{task}:Killing", model_folder, tmp_path / "run"), "--rewards.isolate", "never"]
    done = subprocess.run(
        killing, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and "lockstep: rank 0: another rank has ended or cannot be reached" in done.stderr
    assert "in from_all" not in done.stderr and "in from_all" in (tmp_path / "run/logs/rank_0.log").read_text()
