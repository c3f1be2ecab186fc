"""Whole reinforcement runs: what a run learns, writes and reports, and how it ends."""

import json
import os
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from lockstep.commands.summary import print_summary
from lockstep.config import (
    CheckpointConfig,
    EngineConfig,
    ParallelConfig,
    RLConfig,
    TrainConfig,
    algorithm_of,
    from_toml,
)
from lockstep.errors import RunStopped, UserError
from lockstep.rl.reinforce import reinforce
from lockstep.rl.scoring.parity import ParityError
from lockstep.train.schedule import make_schedule
from tests.rl.environments.test_environments import gsm8k_folder
from tests.rl.small_runs import VOWELS, EvenBytes, lines_of, rollouts_of, small_config, steps_of

KEYS = {
    "step", "time", "loss", "grad_norm", "learning_rate", "reward/mean", "reward/std", "reward/correct/mean",
    "reward/format/mean", "rollout/tokens_mean", "rollout/truncated", "rollout/tokens_per_second", "policy/ratio_max",
    "policy/clip_fraction", "policy/entropy", "policy/kl", "policy/staleness_max", "parity/tokens_checked",
    "parity/tokens_different", "parity/max_delta", "time/generate", "time/reward", "time/train", "time/weight_sync",
    "time/step", "generators/own/busy", "generators/own/queue_seconds", "generators/own/prefill_seconds",
    "generators/own/decode_seconds", "generators/own/token_seconds",
}  # fmt: skip


@pytest.fixture
def vowels(tmp_path):
    """The name of a user's own task."""
    (tmp_path / "my_task.py").write_text(VOWELS)
    return f"{tmp_path}/my_task.py:Vowels"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_gsm8k_trains_with_every_bit_compared(tmp_path, model_folder, dtype, capsys):
    config = RLConfig(
        output=str(tmp_path / "run"), model=str(model_folder), environment="gsm8k", data=str(gsm8k_folder(tmp_path)),
        steps=3, prompts_per_step=3, samples_per_prompt=4, max_new_tokens=12, validation_examples=4, dtype=dtype,
        updates_per_batch=2, kl_coefficient=0.05, temperature=0.9,
        train=TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=700),
        engine=EngineConfig(max_tokens_per_step=256, max_sequences=8, cache_tokens=2048),
    )  # fmt: skip
    folder = reinforce(config)
    steps = steps_of(folder)
    assert [m["step"] for m in steps] == [1, 2, 3]
    for metrics in steps:
        assert metrics.keys() >= KEYS
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
    first, last = (lines_of(folder / "rollouts" / f"validation_0000000{n}.jsonl") for n in (0, 3))
    assert [x["prompt"] for x in first] == [x["prompt"] for x in last] and len(first) == 4
    assert summary["parity_tokens_checked"] == sum(m["parity/tokens_checked"] for m in steps)
    rollouts = rollouts_of(folder, 2)
    assert len(rollouts) == 12
    assert {"prompt", "completion", "token_ids", "log_probs", "rewards", "advantage"} <= rollouts[0].keys()
    assert len(rollouts[0]["token_ids"]) == len(rollouts[0]["log_probs"])
    resolved = asdict(algorithm_of(config)) | {"arithmetic": summary["arithmetic"]}
    resolved["parallel"] = ParallelConfig(reduction_chunks=1)
    assert from_toml(folder / "config.toml", RLConfig()) == replace(config, **resolved)
    assert "Parity of trainer and generator" in (folder / "report.html").read_text()


def test_a_task_of_the_users_own_is_learned_and_a_run_resumes_to_the_same_bits(tmp_path, model_folder, vowels, caplog):
    changes = dict(
        environment=vowels, steps=6, prompts_per_step=4, samples_per_prompt=16, max_new_tokens=12,
        updates_per_batch=2, checkpoint=CheckpointConfig(every=3),
        train=TrainConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant"),
    )  # fmt: skip
    whole = reinforce(small_config(tmp_path / "whole", model_folder, **changes))
    rewards = [m["reward/mean"] for m in steps_of(whole)]
    assert max(rewards[-3:]) > max(rewards[:2]) + 0.02, rewards
    ratios = [(m["policy/ratio_first_max"], m["policy/ratio_max"]) for m in steps_of(whole)]
    assert all(first == 1.0 and second > 1.0 for first, second in ratios), "the second update has moved away"

    summary = json.loads((whole / "summary.json").read_text())
    assert summary["reward_name"] == "reward" and "accuracy_after" not in summary, "a share of vowels is no accuracy"
    report = (whole / "report.html").read_text().lower()
    assert "held-out reward" in report
    # The task gives the same examples for both splits.
    assert "on prompts, 2 of which are also trained on." in report and "never trained on" not in report
    assert "2 of 2 validation examples are also trained on" in caplog.text

    torn = Path(shutil.copytree(whole, tmp_path / "torn"))
    (torn / "checkpoints" / "step_00000006").rename(torn / "checkpoints" / "step_00000006.partial")
    reinforce(small_config(tmp_path / "torn", model_folder, resume=True, **changes))
    assert [m["reward/mean"] for m in steps_of(torn)] == rewards
    assert [m["tokens/total"] for m in steps_of(torn)] == [m["tokens/total"] for m in steps_of(whole)]
    for step in (1, 4, 6):
        name = f"rollouts/step_{step:08}.jsonl"
        assert (torn / name).read_text() == (whole / name).read_text(), "the weights' version included"
    assert rollouts_of(torn, 6)[0]["version"] == 5


TRAIN = TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="cosine")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory, folders):
    """The settings of a run of two steps, with three updates each and advantages that are not divided."""
    folder = tmp_path_factory.mktemp("short_run")
    (folder / "my_task.py").write_text(VOWELS)
    config = small_config(
        folder / "run", folders[0], environment=f"{folder / 'my_task.py'}:Vowels", updates_per_batch=3, train=TRAIN,
        normalize_advantages=False, kl_coefficient=0.1, temperature=0.7, max_new_tokens=8,
    )  # fmt: skip
    reinforce(config)
    return config


def test_settings_of_the_update_are_followed(short_run):
    steps = steps_of(Path(short_run.output))
    schedule = make_schedule(TRAIN, 6)
    assert [m["learning_rate"] for m in steps] == [schedule(2), schedule(5)], "the schedule counts every update"
    # From the starting model, at the run's temperature: exactly 0 before the first update.
    assert steps[0]["policy/kl"] >= 0 and steps[1]["policy/kl"] > 0
    rollouts = rollouts_of(Path(short_run.output), 1)
    assert any(rollout["advantage"] for rollout in rollouts)
    for start in range(0, len(rollouts), 4):
        group = rollouts[start : start + 4]
        mean = sum(rollout["reward"] for rollout in group) / 4
        # Rewards are below 1, and float32 in the mean and the difference, whose last bit is 6e-8 there.
        expected = [pytest.approx(rollout["reward"] - mean, abs=1e-7) for rollout in group]
        assert [rollout["advantage"] for rollout in group] == expected


def test_a_finished_run_that_is_resumed_writes_a_missing_report(tmp_path, short_run):
    config = replace(short_run, output=str(tmp_path / "run"), resume=True)
    folder = Path(shutil.copytree(short_run.output, config.output))
    (folder / "report.html").unlink()  # as if the run was killed before writing it
    summary = (folder / "summary.json").read_text()
    reinforce(config)
    assert (folder / "report.html").is_file() and (folder / "summary.json").read_text() == summary


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path, folders, vowels):
    # No float32 holds the coefficient, so every loss is infinite times 0.
    config = small_config(tmp_path / "run", folders[0], environment=vowels, steps=5, kl_coefficient=1e300)
    config.faults.max_skipped_steps = 1
    with pytest.raises(RunStopped, match="step 2: .* Skipped steps in a row: 2;"):
        reinforce(config)


def test_a_difference_stops_the_run_with_the_token_and_both_values(tmp_path, folders, vowels, monkeypatch):
    from lockstep.rl.scoring import policy_loss

    exact = policy_loss.target_log_probs

    def off_by_a_bit(*given):
        log_probs, entropy = exact(*given)
        off = log_probs.detach().clone()
        off[3] = torch.nextafter(off[3], torch.tensor(1.0))
        return log_probs + (off - log_probs.detach()), entropy

    # The bits do agree, so the one that differs has to be made.
    monkeypatch.setattr(policy_loss, "target_log_probs", off_by_a_bit)
    train = TrainConfig(tokens_per_microbatch=1024)  # one micro-batch, in which one token differs
    config = small_config(tmp_path / "stop", folders[0], environment=vowels, steps=1, train=train)
    difference = r"step 1: 1 of \d+ .* token \d+ at position \d+ .*generator -\d.*trainer -\d"
    with pytest.raises(ParityError, match=difference):
        reinforce(config)
    with pytest.warns(UserWarning, match="log-probabilities differ"):
        reinforce(replace(config, output=str(tmp_path / "warn"), on_parity_error="warn"))


class EndsInValidation(EvenBytes):
    """A signal ends the run in its second validation."""

    left = 2

    def reward(self, example, completion):
        if example.prompt == "music:":
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().reward(example, completion)


def test_a_summary_has_only_the_validations_of_a_runs_first_and_last_step(tmp_path, folders, capsys):
    def summarized():
        capsys.readouterr()
        print_summary(folder)
        return json.loads((folder / "summary.json").read_text()), capsys.readouterr().out

    config = small_config(tmp_path / "run", folders[0], steps=1, validation_examples=0, resume=True)
    folder = reinforce(config, EvenBytes())
    assert "has no run to resume: this is its first start" in capsys.readouterr().err
    assert [line["step"] for line in lines_of(folder / "metrics.jsonl")] == [1]
    assert not any(name.startswith("validation") for name in steps_of(folder)[0])
    summary, printed = summarized()
    assert not {"reward_before", "reward_after"} & summary.keys() and summary["parity_tokens_different"] == 0
    assert "->" not in printed and "0 different" in printed and " s in all: " in printed
    assert any(f"{word}:" in (folder / "report.html").read_text() for word in EvenBytes.words), "samples of training"

    reinforce(replace(config, steps=2, validation_examples=2), EvenBytes())
    summary, printed = summarized()
    assert "reward_before" not in summary
    assert summary["reward_after"] == steps_of(folder)[-1]["validation/reward"]
    assert f"reward {summary['reward_after']:.3f} on held-out examples, after the last step" in printed
    assert " s since step 1\n" in printed and "Mean reward after the last step" in (folder / "report.html").read_text()

    reinforce(replace(config, steps=3), EvenBytes())
    assert [line["step"] for line in steps_of(folder)] == [1, 2, 3]
    assert not {"reward_before", "reward_after"} & summarized()[0].keys()


def test_a_validation_that_is_caught_up_is_in_the_summary_that_was_written_without_it(tmp_path, folders):
    config = small_config(tmp_path / "run", folders[0], steps=1)
    with pytest.raises(RunStopped, match="SIGTERM"):
        reinforce(config, EndsInValidation())
    folder = reinforce(replace(config, resume=True, validation_examples=0), EvenBytes())
    assert "reward_after" not in json.loads((folder / "summary.json").read_text())
    reinforce(replace(config, resume=True), EvenBytes())
    last = steps_of(folder)[-1]
    assert json.loads((folder / "summary.json").read_text())["reward_after"] == last["validation/reward"]


def test_a_task_without_validation_examples_is_told_how_to_train(tmp_path, folders):
    class NothingHeldOut(EvenBytes):
        def examples(self, split):
            return super().examples(split) if split == "train" else []

    with pytest.raises(UserError, match=r'examples\("validation"\) yields nothing.*validation_examples = 0'):
        reinforce(small_config(tmp_path / "run", folders[0]), NothingHeldOut())
