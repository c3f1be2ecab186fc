"""A finished step computed again: the recorded bits, or which of them differ."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest

from lockstep.cli import main
from lockstep.config import CheckpointConfig, RLConfig, from_toml, to_toml
from lockstep.errors import UserError
from lockstep.rl.environments.protocol import Example
from lockstep.rl.reinforce import reinforce
from lockstep.rl.replay import OF_ROLLOUTS, replay, replayable
from lockstep.rl.rollouts.records import Conversation, Rollout, Scores, write_rollouts
from tests.rl.small_runs import VOWELS, Half, lines_of, small_config

EVERY = CheckpointConfig(every=1, keep_last=0, asynchronous=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory, folders):
    """Two steps of DAPO on a task of which half the groups teach nothing, with a KL divergence."""
    changes = dict(
        algorithm="dapo", extra_rounds=6, updates_per_batch=2, kl_coefficient=0.05, kl_reference=str(folders[1])
    )
    config = small_config(tmp_path_factory.mktemp("replay") / "run", folders[0], checkpoint=EVERY, **changes)
    return reinforce(config, Half())


def differing_of(result):
    return {quantity.name for quantity in result.quantities if quantity.different}


@pytest.mark.slow
def test_refilled_groups_and_the_first_step_are_replayed_and_sampled_again(run):
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(m.get("groups/dropped/equal_rewards") for m in metrics)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    for step in (1, 2):
        again = replay(run, step, Half())
        assert again.equal and again.step == step
    sampled = replay(run, environment=Half(), sample=True)
    assert sampled.equal and sampled.step == 2 and "tokens" in {q.name for q in sampled.quantities}
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before, "the run is only read"


@pytest.fixture
def copy(tmp_path, run):
    """A copy of the run, for what spoils it."""
    return shutil.copytree(run, tmp_path / "run")


def tamper(run, change, step=2):
    """Does `change` to the first rollout of a step that is trained on."""
    path = run / f"rollouts/step_{step:08}.jsonl"
    lines = lines_of(path)
    change(next(line for line in lines if line["advantage"]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def _next_token(line):
    line["token_ids"][1] = line["token_ids"][1] % 100 + 1


def _nudge(values, place):
    # The last bit of a float32: what a double keeps of it would be rounded away.
    values[place] *= 1 + 2**-22


def what_is_computed(line):
    """Changes what a replay computes again, and does not read."""
    line["rewards"].update(reward=line["rewards"]["reward"] + 1e-9)
    line.update(reward=line["reward"] + 1e-9, advantage=line["advantage"] + 1e-9, prompt="x", dropped="equal_rewards")
    _nudge(line["reference_log_probs"], 1)


@pytest.mark.parametrize(
    ("change", "differing", "equal"),
    [
        (
            what_is_computed,
            {"rewards", "advantages", "prompts", "dropped", "reference's log-probabilities"},
            {"loss", "grad_norm", "trainer's log-probabilities"},
        ),
        (
            lambda line: _nudge(line["log_probs"], 0),
            {"trainer's log-probabilities", "other metrics"},
            {"rewards", "advantages", "prompts", "dropped"},
        ),
        (_next_token, {"reference's log-probabilities", "loss", "grad_norm"}, {"rewards", "advantages"}),
        (lambda line: line.update(completion="\x01"), {"rewards", "advantages", "loss"}, {"prompts"}),
    ],
    ids=["what is computed", "a log-probability", "a token", "the text"],
)
def test_a_record_that_was_changed_is_found_and_named(copy, change, differing, equal):
    warns = "trainer's log-probabilities" in differing or change is _next_token
    with pytest.warns(UserWarning) if warns else nullcontext():
        result = replay(tamper(copy, change), 2, Half())
    assert differing <= differing_of(result), result.text()
    assert not equal & differing_of(result), result.text()


def test_every_field_of_a_rollout_that_is_written_is_compared(tmp_path):
    whole = Rollout(
        Example("p", "a"), 0, [1], [2, 3], [-1.0, -2.0], "stop", "x", 3, [0.25, 0.5], [True, True],
        episode=0, routes=["AA==", "AQ=="], conversation=Conversation([{"role": "user"}]),
        scores=Scores({"reward": 1.0}, 1.0, "raised", True, "d", 0.5, *([0.25, 0.5] for _ in range(7))),
    )  # fmt: skip
    write_rollouts(tmp_path / "line.jsonl", [whole])
    (line,) = lines_of(tmp_path / "line.jsonl")
    not_compared = {"finish_reason", "group", "version", "prompt_ids", "episode", "turns"}  # follow from the others
    assert {field for fields in OF_ROLLOUTS.values() for field in fields} == {*line} - not_compared


def test_a_run_records_an_environment_that_it_was_given_and_is_not_replayed_or_resumed_with_another(copy, run, caplog):
    recorded = from_toml(run / "config.toml", RLConfig()).environment
    assert recorded == "object:tests.rl.small_runs.Half"
    report = (run / "report.html").read_text()
    assert "dapo on tests.rl.small_runs.Half" in report and "digit_sum" not in report
    said = r"got its environment as an object \(tests.rl.small_runs.Half\); pass it to lockstep.reinforce"
    with pytest.raises(UserError, match=said):
        replay(run, 2)
    assert main(["rl", "--resume", "--output", str(copy), "--steps", "3"]) == 2
    config = from_toml(run / "config.toml", RLConfig())
    changes = dict(output=str(copy), resume=True, steps=3)
    with pytest.raises(UserError, match=said):
        reinforce(replace(config, **changes))
    # Whoever resumes from Python writes the settings again, without the name.
    for environment in (recorded, RLConfig().environment):
        caplog.clear()
        reinforce(replace(config, environment=environment, **changes), Half())
        assert "environment" not in caplog.text
    assert replay(copy, 3, Half()).equal


def test_a_changed_value_in_the_metrics_is_found(copy):
    path = copy / "metrics.jsonl"
    lines = lines_of(path)
    names = {"grad_norm": "grad_norm", "policy/entropy": "other metrics", "loss": "loss"}
    for line in lines:
        if line["step"] == 2:
            line.update({name: line[name] * (1 + 2**-50) for name in names})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = replay(copy, 2, Half())
    assert differing_of(result) == {*names.values()}
    assert {q.name: q.different for q in result.quantities}["other metrics"] == 1


def test_what_cannot_be_computed_again_is_refused_with_the_steps_that_can(tmp_path, copy):
    with pytest.raises(UserError, match=r"step 3 of .* steps that can: 1-2"):
        replay(copy, 3)
    with pytest.raises(UserError, match=r"step 0 of .* its rollouts and.* steps that can: 1-2"):
        replay(copy, 0)
    with pytest.raises(UserError, match="contains no run"):
        replay(tmp_path, 1)
    shutil.rmtree(copy / "checkpoints/step_00000001")
    assert replayable(copy) == [1]
    with pytest.raises(UserError, match=r"step 2 .* steps that can: 1$"):
        replay(copy, 2)
    (copy / "rollouts/step_00000001.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=r"step_00000001.jsonl:1: is not a rollout of a run \(it has no completion"):
        replay(copy, 1, Half())


CHANGES = [
    (lambda line: line.update(token_ids=["a"]), "token_ids"),
    (lambda line: line["token_ids"].__setitem__(0, 10**9), "token 1000000000, but the model's vocabulary"),
    (lambda line: line["token_ids"].__setitem__(0, -5), "token_ids"),
    (lambda line: line["log_probs"].pop(), "log_probs for"),
    (lambda line: line["log_probs"].__setitem__(0, "x"), "log_probs"),
    (lambda line: line.update(group="z"), "group"),
    (lambda line: line.update(prompt=None), "prompt"),
    (lambda line: line.update(prompt_ids=[]), "prompt_ids are empty"),
    (lambda line: line.update(completion=5), "completion"),
    (lambda line: line.update(rewards=[1.0]), "rewards"),
]


def test_rollouts_and_metrics_that_are_damaged_are_refused_by_file_and_line(copy):
    rollouts, metrics = copy / "rollouts/step_00000002.jsonl", copy / "metrics.jsonl"
    whole, recorded = rollouts.read_bytes(), metrics.read_bytes()
    for change, said in CHANGES:
        with pytest.raises(UserError, match=rf"step_00000002.jsonl:\d+: is not a rollout of .*{said}"):
            replay(tamper(copy, change), 2, Half())
        rollouts.write_bytes(whole)
    for spoiled in (whole[: len(whole) // 2], b"\xff\xfe" + whole, b"\0" * 9, b"[" * 10**5, b"[1]\n", b""):
        rollouts.write_bytes(spoiled)
        with pytest.raises(UserError, match=rollouts.name):
            replay(copy, 2, Half())
    rollouts.write_bytes(whole)
    for line in (b"{", b"\xff", b"\0", b"[1]", b'{"loss": 1}'):
        metrics.write_bytes(line + b"\n" + recorded)
        with pytest.raises(UserError, match="metrics.jsonl:1"):
            replay(copy, 2, Half())


def test_the_settings_are_those_that_the_step_was_computed_with(copy):
    """A run that was resumed with others since has those in its own file."""
    config = from_toml(copy / "config.toml", RLConfig())
    (copy / "config.toml").write_text(to_toml(replace(config, clip_high=0.9, kl_coefficient=0.5)))
    assert replay(copy, 2, Half()).equal
    shutil.rmtree(copy / "checkpoints/step_00000002")
    assert {"loss", "grad_norm"} <= differing_of(replay(copy, 2, Half()))


def test_the_command_says_whether_the_bits_are_those_and_ends_with_0_or_1(tmp_path, folders, capsys):
    task = tmp_path / "task.py"
    task.write_text(VOWELS)
    changes = dict(environment=f"{task}:Vowels", checkpoint=EVERY, prompts_per_step=2)
    reinforce(small_config(tmp_path / "run", folders[0], **changes))
    assert main(["replay", str(tmp_path / "run"), "--step", "1"]) == 0
    assert capsys.readouterr().out.endswith("the recorded bits\n")
    # Of another length: Python takes a file of the same second and length for the one that it has compiled.
    task.write_text(VOWELS.replace("return ", "import random; return random.random() + "))
    assert main(["replay", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert "step 2, recomputed" in said and "it is random or asks a judge" in said
    assert main(["replay", str(tmp_path / "run"), "--step", "9"]) == 2
