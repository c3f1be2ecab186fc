"""Whole runs of every algorithm on a small random model: what is drawn, dropped, charged and compared."""

import math
from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest
import torch

from lockstep.commands.options import run_config
from lockstep.config import (
    ALGORITHMS,
    ActorsConfig,
    CheckpointConfig,
    LoraConfig,
    RLConfig,
    TrainConfig,
    algorithm_of,
    from_toml,
)
from lockstep.config import validate as validate_config
from lockstep.data import train_bpe
from lockstep.errors import UserError
from lockstep.model import load_model
from lockstep.rl.reinforce import reinforce
from lockstep.rl.replay import replay
from lockstep.rl.scoring.reference import MovingAverage
from lockstep.train import Trainer
from tests.rl.small_runs import EvenBytes, Half, Hopeless, rollouts_of, small_config, steps_of, write_model


def test_a_cut_is_corrected_by_the_mass_that_it_kept_and_parity_compares_what_is_before_it(tmp_path, folders):
    cuts = dict(top_k=20, top_p=0.8, temperature=0.7)
    for how in ("truncate", "none"):
        changes = dict(cuts, off_policy=how, updates_per_batch=2)
        folder = reinforce(small_config(tmp_path / how, folders[0], **changes), EvenBytes())
        for step, metrics in enumerate(steps_of(folder), 1):
            rollouts = rollouts_of(folder, step)
            kept = [p - q for r in rollouts for p, q in zip(r["log_probs"], r["truncated_logprobs"], strict=True)]
            assert all(mass < 0 for mass in kept), "some tokens were left out"
            assert metrics["parity/tokens_different"] == 0 < metrics["parity/tokens_checked"]
            assert metrics["policy/ratio_first_max"] == 1.0, "the ratio of the loss is taken before the cut"
            assert ("off_policy/ratio_min" in metrics) == (how == "truncate")
            if how == "truncate":
                # exp of a difference of float32 numbers below 6, which are rounded to 2.4e-7 each.
                assert metrics["off_policy/ratio_min"] == pytest.approx(math.exp(min(kept)), rel=1e-6)
                assert metrics["off_policy/ratio_max"] == pytest.approx(math.exp(max(kept)), rel=1e-6)
    changes = dict(kl_coefficient=0.1, kl_reference=str(folders[1]), steps=1)
    uncut = reinforce(small_config(tmp_path / "uncut", folders[0], **changes), EvenBytes())
    assert not any("truncated_logprobs" in r for r in rollouts_of(uncut, 1))
    assert steps_of(uncut)[0]["policy/kl"] > 0, "the divergence from a folder is that model's"


SLOW = ("dapo", "distillation", "grpo", "ppo", "reinforce++", "reinforce++-baseline")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in ALGORITHMS])
def test_every_algorithm_trains_with_every_bit_compared_and_is_replayed_from_its_record(tmp_path, folders, name):
    teacher = {"teacher": str(folders[1])} if name == "distillation" else {}
    kl = {} if name == "distillation" else {"kl_coefficient": 0.05, "kl_in": "loss"}
    updates = 1 if name in ("rloo", "distillation") else 2
    changes = {"algorithm": name, "updates_per_batch": updates, "off_policy": "truncate", "entropy_coefficient": 0.01}
    every = CheckpointConfig(every=1, keep_last=0, last_model_only=False)
    config = small_config(tmp_path / "run", folders[0], checkpoint=every, **changes, **teacher, **kl)
    folder = reinforce(config, EvenBytes())
    for metrics in steps_of(folder):
        assert metrics["parity/tokens_different"] == 0 < metrics["parity/tokens_checked"]
        assert metrics["policy/ratio_first_max"] == 1.0
        assert (metrics["policy/ratio_max"] > 1.0) == (updates > 1)
        assert metrics["off_policy/ratio_min"] == metrics["off_policy/ratio_max"] == 1.0, "the sampler is the policy"
        assert metrics["skipped_steps"] == 0 and metrics["grad_norm"] > 0
        dropped = sum(v for k, v in metrics.items() if k.startswith("groups/dropped"))
        assert metrics["groups/drawn"] == metrics["groups/trained"] + dropped
    recorded = from_toml(folder / "config.toml", RLConfig())
    assert algorithm_of(recorded) == algorithm_of(config)
    assert all(getattr(recorded, setting) == value for setting, value in asdict(algorithm_of(config)).items())
    before, after = load_model(folders[0]), load_model(folder / "checkpoints" / "step_00000002")
    assert not torch.equal(before.head_weight, after.head_weight)
    result = replay(folder, 2, EvenBytes())
    assert result.equal, result.text()
    compared = {quantity.name: quantity.compared for quantity in result.quantities}
    assert compared["rewards"] == compared["advantages"] == compared["rollouts"] >= 12
    assert f"{'teacher' if teacher else 'reference'}'s log-probabilities" in compared
    assert {"loss", "grad_norm"} <= compared.keys() and compared["other metrics"] > 20


def test_groups_of_equal_reward_are_replaced_and_every_prompt_is_accounted_for(tmp_path, folders):
    changes = dict(algorithm="dapo", extra_rounds=8, steps=3, overlong_share=0.0)
    folder = reinforce(small_config(tmp_path / "run", folders[0], **changes), Half())
    dropped = 0.0
    for step, metrics in enumerate(steps_of(folder), 1):
        dropped += metrics.get("groups/dropped/equal_rewards", 0.0)
        assert metrics["groups/trained"] == 3
        assert metrics["groups/drawn"] == 3 + metrics.get("groups/dropped/equal_rewards", 0.0)
        rollouts = rollouts_of(folder, step)
        assert len(rollouts) == 4 * metrics["groups/drawn"]
        assert sorted({r["group"] for r in rollouts}) == list(range(int(metrics["groups/drawn"])))
        for group in {r["group"] for r in rollouts}:
            own = [r for r in rollouts if r["group"] == group]
            equal = len({r["reward"] for r in own}) == 1
            assert {r.get("dropped", "") for r in own} == {"equal_rewards" if equal else ""}
        assert metrics["parity/tokens_checked"] == sum(len(r["token_ids"]) for r in rollouts if "dropped" not in r)
        assert metrics["rollout/completions_trained"] == 12
    assert dropped > 0


def test_a_task_without_spread_is_drawn_a_bounded_number_of_times_and_the_step_completes(tmp_path, folders):
    folder = reinforce(
        small_config(tmp_path / "run", folders[0], algorithm="dapo", extra_rounds=2, steps=1), Hopeless()
    )
    (metrics,) = steps_of(folder)
    assert metrics["groups/drawn"] == 9 and metrics["groups/trained"] == 3
    assert metrics["groups/dropped/equal_rewards"] == 6
    rollouts = rollouts_of(folder, 1)
    # Five tokens of five, the last of which is the share of 0.2; charged once, and not before groups are compared.
    assert {r["rewards"]["overlong"] for r in rollouts} == {-1.0, 0.0}
    said = {tuple(tuple(r["token_ids"]) for r in rollouts if r["group"] == group) for group in range(9)}
    assert len(said) == 9, "each round has draws of its own, for the one prompt too"
    # config.toml has every setting of its algorithm: another algorithm brings its own, but for those given anew.
    options = ["--config", str(folder / "config.toml"), "--algorithm", "gspo", "--clip-high", "0.5"]
    config = run_config("rl", RLConfig, options)
    assert algorithm_of(config) == replace(ALGORITHMS["gspo"], clip_high=0.5)
    assert algorithm_of(run_config("rl", RLConfig, options[:2])) == algorithm_of(from_toml(options[1], RLConfig()))


def test_distilling_from_oneself_changes_nothing(tmp_path, folders):
    config = small_config(tmp_path / "run", folders[0], algorithm="distillation", teacher=str(folders[0]), steps=1)
    folder = reinforce(config, EvenBytes())
    (metrics,) = steps_of(folder)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["advantage/abs_max"] == 0.0


def test_a_moving_average_follows_the_policy_and_a_run_with_it_resumes_to_the_same_bits(tmp_path, folders):
    changes = dict(kl_coefficient=0.1, steps=4, checkpoint=CheckpointConfig(every=2, last_model_only=False))
    start = reinforce(small_config(tmp_path / "start", folders[0], **changes), EvenBytes())
    changes |= dict(kl_reference="average", kl_average_decay=0.5)
    whole = reinforce(small_config(tmp_path / "whole", folders[0], **changes), EvenBytes())
    far, near = ([m["policy/kl"] for m in steps_of(run)] for run in (start, whole))
    assert far[0] == near[0] == 0.0 and near[1] > 0 and near[-1] < far[-1]
    (whole / "checkpoints" / "step_00000004").rename(whole / "checkpoints" / "step_00000004.partial")
    losses = [m["loss"] for m in steps_of(whole)]
    reinforce(small_config(whole, folders[0], resume=True, **changes), EvenBytes())
    assert [m["loss"] for m in steps_of(whole)] == losses and [m["policy/kl"] for m in steps_of(whole)] == near


def test_a_moving_average_keeps_its_share_and_takes_the_rest_from_the_policy(folders):
    trainer = Trainer(load_model(folders[0], "float32"), TrainConfig(), 1)
    reference = load_model(folders[0], "float32")
    average = MovingAverage(reference, trainer, 0.75)
    with torch.no_grad():
        for own in average.averages.values():
            own.zero_()
        for master in trainer.optimizer.masters.values():
            master.fill_(4.0)
    for expected in (1.0, 1.75):
        average.update()
        assert all((parameter == expected).all() for parameter in reference.parameters())


def test_a_model_of_another_vocabulary_is_refused_by_its_setting(tmp_path, folders, bpe_tokenizer):
    larger = str(folders[2])
    for changes in (dict(kl_reference=larger, kl_coefficient=0.1), dict(algorithm="distillation", teacher=larger)):
        said = r"(kl_reference|teacher) .*larger: its vocabulary is not that of .*300 tokens, not 258"
        with pytest.raises(UserError, match=said):
            reinforce(small_config(tmp_path / "run", folders[0], **changes), EvenBytes())

    def with_tokenizer(name, tokenizer):
        folder = write_model(tmp_path / name, vocab=512)
        tokenizer.save(folder)
        (folder / "byte_tokenizer.json").unlink(missing_ok=True)
        return folder

    model = with_tokenizer("bytes", bpe_tokenizer)
    other = ["quite another text, of other words and letters " * 50]
    reference = with_tokenizer("other", train_bpe(other, bpe_tokenizer.vocab_size))
    with pytest.raises(UserError, match="other tokens for the same ids"):
        reinforce(small_config(tmp_path / "run", model, kl_coefficient=0.1, kl_reference=str(reference)), EvenBytes())


def test_a_setting_that_is_given_goes_before_the_algorithms(tmp_path):
    (tmp_path / "run.toml").write_text('algorithm = "dapo"\nclip_high = 0.3\n')
    config = from_toml(tmp_path / "run.toml", RLConfig())
    algorithm = algorithm_of(config)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.extra_rounds) == (0.2, 0.3, 3)
    assert algorithm_of(RLConfig(algorithm="dapo", extra_rounds=0)).extra_rounds == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "ppo", "loss": "clip_sequence"}, "advantage gae of ppo computes one per token"),
        ({"value_detached": True}, 'advantage "group" has no value function'),
        ({"algorithm": "gpro"}, 'algorithm is "gpro"; give grpo, '),
        ({"clip_low": 1.5}, "clip_low is 1.5; it must be 1 or less"),
        ({"extra_rounds": 1.5}, "extra_rounds is 1.5; it must be a whole number"),
        ({"algorithm": "rloo", "normalize_advantages": True}, "advantage leave_one_out of rloo is not normalized"),
        ({"algorithm": "distillation"}, "advantage teacher of distillation needs a teacher: give the folder"),
        ({"teacher": "DIR"}, "teacher is set, but advantage group of grpo does not use one"),
        (
            {"algorithm": "rloo", "updates_per_batch": 2},
            "loss reinforce has no ratio, so all but the first of 2 updates",
        ),
        ({"algorithm": "distillation", "teacher": "D", "extra_rounds": 1}, "extra_rounds drops groups with equal"),
        ({"algorithm": "rejection", "kl_in": "reward", "kl_coefficient": 0.1}, "ignores a KL divergence in"),
        ({"kl_reference": "average"}, "kl_reference is average, but kl_coefficient is 0"),
        ({"algorithm": "reinforce++", "loss": "clip_sequence", "kl_coefficient": 0.1}, "loss clip_sequence takes one"),
        ({"samples_per_prompt": 1}, "samples_per_prompt is 1; it must be 2 or more"),
        ({"temperature": float("nan")}, "temperature is nan; it must be finite"),
        ({"loss": "reinforce", "clip_high": 0.3}, 'clip_high is 0.3, but loss "reinforce" has no ratio to clip'),
        ({"kl_in": "reward"}, "kl_in is reward, but kl_coefficient is 0"),
        ({"kl_coefficient": 0.1, "kl_average_decay": 0.5}, 'kl_average_decay is 0.5, but kl_reference is "start"'),
        ({"off_policy_high": 3.0}, "off_policy_high is 3.0, but off_policy is none"),
        ({"reward_model_weight": 2.0}, "reward_model_weight is 2.0, but there is no reward_model"),
        ({"lora": LoraConfig(alpha=4.0)}, "lora.rank is 0, so there is no adapter"),
        ({"algorithm": "cispo", "loss": "reinforce"}, ""),
        ({"algorithm": "ppo", "advantage": "group", "gae_gamma": 1.0}, ""),
        ({"off_policy": "mask", "off_policy_low": 0.1}, ""),
        ({"actors": ActorsConfig(urls=("http://a:1",)), "off_policy_high": 3.0}, ""),  # where empty means truncate
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_or_have_no_effect_are_refused_and_others_are_not(changes, message):
    config = RLConfig(model="m")
    for name, value in changes.items():  # as a file may give them, of any type
        setattr(config, name, value)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        validate_config(config)
