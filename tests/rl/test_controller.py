"""Whole reinforcement runs on a small random model, real tokenizer and real data."""

import json
import os
import re
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from lockstep.commands.summary import print_summary
from lockstep.config import (
    ActorsConfig,
    CheckpointConfig,
    EngineConfig,
    LoraConfig,
    ParallelConfig,
    RLConfig,
    TrainConfig,
    algorithm_of,
    from_toml,
    validate,
)
from lockstep.errors import RunStopped, UserError
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.prompts import PromptLoader
from lockstep.rl.scoring.parity import Parity, ParityError
from lockstep.rl.scoring.parity_check import check_parity
from lockstep.train.schedule import make_schedule
from tests.checkpoint.runs import rewrite_state
from tests.rl.environments.test_environments import gsm8k_folder

KEYS = {
    "step", "time", "loss", "grad_norm", "learning_rate", "reward/mean", "reward/std", "reward/correct/mean",
    "reward/format/mean", "rollout/tokens_mean", "rollout/truncated", "rollout/tokens_per_second", "policy/ratio_max",
    "policy/clip_fraction", "policy/entropy", "policy/staleness_max", "parity/tokens_checked",
    "parity/tokens_different", "parity/max_delta", "time/generate", "time/reward", "time/train", "time/weight_sync",
    "time/step", "generators/own/busy", "generators/own/queue_seconds", "generators/own/prefill_seconds",
    "generators/own/decode_seconds", "generators/own/token_seconds",
}  # fmt: skip


def _config(output, model, data, **changes):
    defaults = dict(
        output=str(output), model=str(model), environment="gsm8k", data=str(data), steps=3, prompts_per_step=3,
        samples_per_prompt=4, max_new_tokens=12, validation_examples=4,
        train=TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=700),
        engine=EngineConfig(max_tokens_per_step=256, max_sequences=8, cache_tokens=2048),
    )  # fmt: skip
    return RLConfig(**(defaults | changes))


def _metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gsm8k_trains_with_every_bit_compared(tmp_path, model_folder, dtype, capsys):
    data = gsm8k_folder(tmp_path)
    config = _config(
        tmp_path / "run", model_folder, data, dtype=dtype, updates_per_batch=2, kl_coefficient=0.05, temperature=0.9
    )
    folder = reinforce(config)
    steps = _metrics(folder)[1:]
    assert [m["step"] for m in steps] == [1, 2, 3]
    for metrics in steps:
        assert KEYS | {"policy/kl"} <= metrics.keys()
        assert metrics["parity/tokens_different"] == 0 and metrics["parity/tokens_checked"] > 0
        assert metrics["policy/ratio_first_max"] == 1.0
        laps = [name for name in metrics if name.startswith("time/share/")]
        assert {"time/share/generate", "time/share/train"} < {*laps} and 0.9 < sum(metrics[n] for n in laps) <= 1.001
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["tokens"]["generated"] == sum(m["rollout/tokens"] for m in steps)
    assert summary["tokens"]["trained"] == 2 * sum(m["rollout/tokens"] + m["rollout/prompt_tokens"] for m in steps)
    assert summary["tokens"]["trained"] == sum(m["tokens"] for m in steps) == steps[-1]["tokens/total"]
    printed = [line for line in capsys.readouterr().out.splitlines() if "validation" in line]
    assert [line.split(": ")[1] for line in printed] == ["validation before step 1", "validation after step 3"]
    assert f"reward {steps[-1]['validation/reward']:.4g}" in printed[1]
    assert {"accuracy_before", "accuracy_after"} <= summary.keys(), "gsm8k knows right answers"
    first, last = ((folder / "rollouts" / f"validation_0000000{n}.jsonl").read_text().splitlines() for n in (0, 3))
    assert [json.loads(x)["prompt"] for x in first] == [json.loads(x)["prompt"] for x in last] and len(first) == 4
    assert summary["parity_tokens_checked"] == sum(m["parity/tokens_checked"] for m in steps)
    rollouts = [json.loads(line) for line in (folder / "rollouts" / "step_00000002.jsonl").read_text().splitlines()]
    assert (
        len(rollouts) == 12
        and {"prompt", "completion", "token_ids", "log_probs", "rewards", "advantage"} <= rollouts[0].keys()
    )
    assert len(rollouts[0]["token_ids"]) == len(rollouts[0]["log_probs"])
    resolved = asdict(algorithm_of(config)) | {"arithmetic": summary["arithmetic"]}
    resolved["parallel"] = ParallelConfig(reduction_chunks=1)
    assert from_toml(folder / "config.toml", RLConfig()) == replace(config, **resolved)
    assert "Parity of trainer and generator" in (folder / "report.html").read_text()


TASK = """
import lockstep.rl as rl

class Vowels(rl.Environment):
    def examples(self, split):
        for word in ("stone", "river", "cloud", "apple"):
            yield rl.Example(prompt=f"{word}:", answer="e")
    def reward(self, example, completion):
        return completion.count("e") / max(1, len(completion))
"""


def test_a_task_of_the_users_own_is_learnt_and_a_run_resumes_to_the_same_bits(tmp_path, model_folder, caplog):
    (tmp_path / "my_task.py").write_text(TASK)
    changes = dict(
        environment=f"{tmp_path / 'my_task.py'}:Vowels",
        steps=9,
        prompts_per_step=4,
        samples_per_prompt=16,
        updates_per_batch=2,
        checkpoint=CheckpointConfig(every=3),
        train=TrainConfig(learning_rate=5e-3, warmup_steps=0, schedule="constant"),
    )
    whole = reinforce(_config(tmp_path / "whole", model_folder, "", **changes))
    rewards = [m["reward/mean"] for m in _metrics(whole)[1:]]
    assert max(rewards[-3:]) > max(rewards[:2]) + 0.02, rewards
    ratios = [(m["policy/ratio_first_max"], m["policy/ratio_max"]) for m in _metrics(whole)[1:]]
    assert all(first == 1.0 and second > 1.0 for first, second in ratios), "the second update has moved away"

    summary = json.loads((whole / "summary.json").read_text())
    assert summary["reward_name"] == "reward" and "accuracy_after" not in summary, "a share of vowels is no accuracy"
    report = (whole / "report.html").read_text().lower()
    assert "held-out reward" in report
    # The task gives the same examples for both splits.
    assert "on prompts, 4 of which are also trained on." in report and "never trained on" not in report
    assert "4 of 4 validation examples are also trained on" in caplog.text

    torn = Path(shutil.copytree(whole, tmp_path / "torn"))
    (torn / "checkpoints" / "step_00000009").rename(torn / "checkpoints" / "step_00000009.partial")
    reinforce(_config(tmp_path / "torn", model_folder, "", resume=True, **changes))
    assert [m["reward/mean"] for m in _metrics(torn)[1:]] == rewards
    assert [m.get("tokens/total") for m in _metrics(torn)] == [m.get("tokens/total") for m in _metrics(whole)]
    for step in (1, 7, 9):
        name = f"rollouts/step_{step:08}.jsonl"
        assert (torn / name).read_text() == (whole / name).read_text(), "the weights' version included"
    assert json.loads((torn / name).read_text().splitlines()[0])["version"] == 8


@pytest.fixture(scope="module")
def run_of_a_step(tmp_path_factory, model_folder):
    """The settings of a run of one step."""
    folder = tmp_path_factory.mktemp("run_of_a_step")
    changes = dict(environment=_task(folder), steps=1, max_new_tokens=2, dtype="float32")
    config = _config(folder / "run", model_folder, "", **changes)
    reinforce(config)
    return config


def _task(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    return f"{tmp_path / 'my_task.py'}:Vowels"


@pytest.mark.parametrize(
    "prompts", [12, None, [], {}, {"position": 4}, {"position": "4", "examples": ""}, {"position": -1, "examples": ""}]
)
def test_a_place_among_the_prompts_that_this_version_does_not_write_is_no_traceback(tmp_path, run_of_a_step, prompts):
    config = replace(run_of_a_step, output=str(tmp_path / "run"), steps=2, resume=True)
    shutil.copytree(run_of_a_step.output, config.output)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    state = json.loads((checkpoint / "state.json").read_text())
    rewrite_state(checkpoint, json.dumps(state | {"prompts": prompts}).encode())
    said = (
        rf"cannot resume .* its position among the prompts is {re.escape(repr(prompts))}, which this version does not"
    )
    with pytest.raises(UserError, match=said):
        reinforce(config)


def test_a_report_that_a_kill_has_prevented_is_written_when_the_run_is_resumed(tmp_path, run_of_a_step):
    folder = Path(shutil.copytree(run_of_a_step.output, tmp_path / "run"))
    (folder / "report.html").unlink()
    summary = (folder / "summary.json").read_text()
    reinforce(replace(run_of_a_step, output=str(folder), resume=True))
    assert (folder / "report.html").is_file() and (folder / "summary.json").read_text() == summary


def test_examples_that_both_splits_have_are_counted_whatever_their_answers_are():
    train = [Example("a", metadata={"rows": torch.zeros(3)}), Example("b", "1"), Example("")]
    same = [Example("a", id="test-0", metadata={"rows": torch.ones(2)}), Example("b", "2")]
    for example in (train[0], same[0]):
        object.__setattr__(example, "answer", ["x", {"y": 1}])  # not as annotated, but environments do it
    assert PromptLoader(train, 0).shared([*same, Example("c"), Example("")]) == 1


def test_advantages_are_not_divided_by_the_deviation_where_that_is_off(tmp_path, model_folder):
    changes = dict(environment=_task(tmp_path), steps=1, max_new_tokens=8, normalize_advantages=False)
    run = reinforce(_config(tmp_path / "run", model_folder, "", **changes))
    rollouts = [json.loads(line) for line in (run / "rollouts/step_00000001.jsonl").read_text().splitlines()]
    assert any(rollout["advantage"] for rollout in rollouts)
    for start in range(0, len(rollouts), 4):
        group = rollouts[start : start + 4]
        mean = sum(rollout["reward"] for rollout in group) / 4
        # Rewards are below 1, and float32 in the mean and the difference, whose last bit is 6e-8 there.
        expected = [pytest.approx(rollout["reward"] - mean, abs=1e-7) for rollout in group]
        assert [rollout["advantage"] for rollout in group] == expected


def test_the_divergence_is_that_from_the_starting_model_at_the_runs_temperature(tmp_path, model_folder):
    changes = dict(environment=_task(tmp_path), steps=2, max_new_tokens=8, kl_coefficient=0.1, temperature=0.7)
    divergences = [
        m["policy/kl"] for m in _metrics(reinforce(_config(tmp_path / "run", model_folder, "", **changes)))[1:]
    ]
    assert divergences[0] == 0 and divergences[1] > 0


def test_the_schedule_counts_every_update(tmp_path, model_folder):
    train = TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="cosine")
    changes = dict(environment=_task(tmp_path), steps=2, updates_per_batch=3, max_new_tokens=4, train=train)
    rates = [
        m["learning_rate"] for m in _metrics(reinforce(_config(tmp_path / "run", model_folder, "", **changes)))[1:]
    ]
    schedule = make_schedule(train, 6)
    assert rates == [schedule(2), schedule(5)]


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path, model_folder):
    # No float32 holds the coefficient, so every loss is infinite times 0.
    changes = dict(environment=_task(tmp_path), steps=5, max_new_tokens=4, kl_coefficient=1e300)
    config = _config(tmp_path / "run", model_folder, "", **changes)
    config.faults.max_skipped_steps = 1
    with pytest.raises(RunStopped, match="step 2: .* Skipped steps in a row: 2;"):
        reinforce(config)


def test_a_run_that_learns_nothing_says_so(tmp_path, model_folder, caplog):
    (tmp_path / "my_task.py").write_text(TASK.replace('completion.count("e") / max(1, len(completion))', "1.0"))
    task = f"{tmp_path / 'my_task.py'}:Vowels"
    changes = dict(environment=task, steps=10, prompts_per_step=2, samples_per_prompt=2, max_new_tokens=2)
    run = reinforce(_config(tmp_path / "run", model_folder, "", **changes))
    assert [m["reward/groups_without_spread"] for m in _metrics(run)[1:]] == [1.0] * 10
    assert "in 10 steps in a row: all completions of each prompt had the same reward" in caplog.text


def test_a_difference_stops_the_run_with_the_token_and_both_values(tmp_path, model_folder, monkeypatch):
    from lockstep.rl.scoring import policy_loss

    (tmp_path / "my_task.py").write_text(TASK)
    exact = policy_loss.target_log_probs

    def off_by_a_bit(*given):
        log_probs, entropy = exact(*given)
        off = log_probs.detach().clone()
        off[3] = torch.nextafter(off[3], torch.tensor(1.0))
        return log_probs + (off - log_probs.detach()), entropy

    # The bits do agree, so the one that differs has to be made.
    monkeypatch.setattr(policy_loss, "target_log_probs", off_by_a_bit)
    changes = dict(environment=f"{tmp_path / 'my_task.py'}:Vowels", steps=1)
    with pytest.raises(
        ParityError, match=r"step 1: 1 of \d+ .* token \d+ at position \d+ .*generator -\d.*trainer -\d"
    ):
        reinforce(_config(tmp_path / "stop", model_folder, "", **changes))
    with pytest.warns(UserWarning, match="log-probabilities differ"):
        reinforce(_config(tmp_path / "warn", model_folder, "", on_parity_error="warn", **changes))


def test_nan_rewards_and_long_prompts_end_the_run_with_their_example(tmp_path, model_folder):
    (tmp_path / "my_task.py").write_text(TASK.replace("completion.count", "float('nan') * completion.count"))
    with pytest.raises(UserError, match="returned nan as 'reward' for example '(stone|river|cloud|apple):'"):
        reinforce(_config(tmp_path / "a", model_folder, "", environment=f"{tmp_path / 'my_task.py'}:Vowels"))
    long = "' '.join(map(str, range(30000)))"
    (tmp_path / "my_task.py").write_text(TASK.replace('f"{word}:"', long))
    with pytest.raises(UserError, match="example .* its prompt of .* context of 32768"):
        reinforce(_config(tmp_path / "b", model_folder, "", environment=f"{tmp_path / 'my_task.py'}:Vowels"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parity_check_runs_a_mixed_load(model_folder, dtype):
    from lockstep import load_model

    parity, load = check_parity(load_model(model_folder, dtype=dtype), tokens=300)
    assert parity == Parity(parity.tokens_checked, 0, 0.0) and parity.tokens_checked >= 300
    assert load["preemptions"] > 0 and load["reused prompt tokens"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_prompt": 1}, "samples_per_prompt is 1; it must be 2 or more"),
        ({"temperature": 1e-50}, "temperature is 1e-50; it must be 0.01 or more"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be 0.01 or more"),
        ({"temperature": float("nan")}, "temperature is nan; it must be finite"),
        (
            {"gae_lambda": 0.9},
            'gae_lambda is 0.9, but advantage "group" has no value function',
        ),
        ({"loss": "reinforce", "clip_high": 0.3}, 'clip_high is 0.3, but loss "reinforce" has no ratio to clip'),
        ({"kl_in": "reward"}, "kl_in is reward, but kl_coefficient is 0"),
        ({"kl_coefficient": 0.1, "kl_average_decay": 0.5}, 'kl_average_decay is 0.5, but kl_reference is "start"'),
        ({"off_policy_high": 3.0}, "off_policy_high is 3.0, but off_policy is none"),
        ({"reward_model_weight": 2.0}, "reward_model_weight is 2.0, but there is no reward_model"),
        ({"lora": LoraConfig(alpha=4.0)}, "lora.rank is 0, so there is no adapter"),
    ],
)
def test_settings_that_teach_nothing_or_have_no_effect_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        reinforce(RLConfig(model="model", **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "rloo"},
        {"algorithm": "cispo", "loss": "reinforce"},
        {"algorithm": "ppo", "advantage": "group", "gae_gamma": 1.0},
        {"off_policy": "mask", "off_policy_low": 0.1},
        {"actors": ActorsConfig(urls=("http://a:1",)), "off_policy_high": 3.0},  # where empty means truncate
        {"kl_coefficient": 0.1, "kl_reference": "average", "kl_average_decay": 0.5},
    ],
    ids=str,
)
def test_an_algorithms_own_settings_and_those_with_an_effect_are_accepted(changes):
    validate(RLConfig(model="model", **changes))


class TrainingAlone(Environment):
    def examples(self, split):
        assert split == "train"
        yield from (Example(prompt=f"{word}:") for word in ("stone", "river", "cloud"))

    def reward(self, example, completion):
        return float(len(completion))


def test_a_run_without_validation_asks_for_no_examples_and_reports_what_it_has(tmp_path, model_folder, capsys):
    config = _config(tmp_path / "run", model_folder, "", steps=2, validation_examples=0, resume=True)
    folder = reinforce(config, TrainingAlone())
    assert "has no run to resume: this is its first start" in capsys.readouterr().err
    assert [line["step"] for line in _metrics(folder)] == [1, 2]
    assert not any(name.startswith("validation") for line in _metrics(folder) for name in line)
    summary = json.loads((folder / "summary.json").read_text())
    assert not {"reward_before", "reward_after"} & summary.keys() and summary["parity_tokens_different"] == 0
    print_summary(folder)
    said = capsys.readouterr().out
    assert "->" not in said and "0 different" in said and " s in all: " in said
    assert "stone" in (folder / "report.html").read_text()
    reinforce(replace(config, steps=3), TrainingAlone())
    assert [line["step"] for line in _metrics(folder)] == [1, 2, 3]
    capsys.readouterr()
    print_summary(folder)
    assert " s since step 2\n" in capsys.readouterr().out


class HeldOutToo(TrainingAlone):
    def examples(self, split):
        return super().examples(split) if split == "train" else [Example(prompt="wind:"), Example(prompt="snow:")]


def test_a_summary_has_only_the_validations_of_the_ends(tmp_path, model_folder, capsys):
    config = _config(tmp_path / "run", model_folder, "", steps=1, validation_examples=0, resume=True)
    folder = reinforce(config, HeldOutToo())
    reinforce(replace(config, steps=2, validation_examples=2), HeldOutToo())
    summary = json.loads((folder / "summary.json").read_text())
    assert "reward_before" not in summary and summary["reward_after"] == _metrics(folder)[-1]["validation/reward"]
    capsys.readouterr()
    print_summary(folder)
    assert f"reward {summary['reward_after']:.3f} on held-out examples, after the last step" in capsys.readouterr().out
    assert "Mean reward after the last step" in (folder / "report.html").read_text()
    reinforce(replace(config, steps=3), HeldOutToo())
    assert not {"reward_before", "reward_after"} & json.loads((folder / "summary.json").read_text()).keys()


class EndsInItsLastValidation(HeldOutToo):
    validated = 0

    def reward(self, example, completion):
        if example.prompt == "snow:":
            self.validated += 1
            if self.validated == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().reward(example, completion)


def test_a_validation_that_is_caught_up_is_in_the_summary_that_was_written_without_it(tmp_path, model_folder):
    config = _config(tmp_path / "run", model_folder, "", steps=1, validation_examples=2)
    with pytest.raises(RunStopped, match="SIGTERM"):
        reinforce(config, EndsInItsLastValidation())
    folder = reinforce(replace(config, resume=True, validation_examples=0), HeldOutToo())
    assert "reward_after" not in json.loads((folder / "summary.json").read_text())
    reinforce(replace(config, resume=True), HeldOutToo())
    last = _metrics(folder)[-1]
    assert json.loads((folder / "summary.json").read_text())["reward_after"] == last["validation/reward"]


class NothingHeldOut(TrainingAlone):
    def examples(self, split):
        return super().examples(split) if split == "train" else []


def test_a_task_without_validation_examples_is_told_how_to_train(tmp_path, model_folder):
    with pytest.raises(UserError, match=r'examples\("validation"\) yields nothing.*validation_examples = 0'):
        reinforce(_config(tmp_path / "run", model_folder, ""), NothingHeldOut())
