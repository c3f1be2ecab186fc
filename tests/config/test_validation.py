"""Settings that cannot work are refused before any work is done, each by its name and with what it may be."""

import copy
import dataclasses
import itertools
import json
import re
import tomllib

import pytest

from lockstep.cli import main
from lockstep.config import (
    ActorsConfig,
    CheckpointConfig,
    DPOConfig,
    LoraConfig,
    PretrainConfig,
    RewardModelConfig,
    RLConfig,
    ServeConfig,
    SFTConfig,
    TrainConfig,
    from_toml,
    recorded_run,
    to_toml,
    validate,
)
from lockstep.errors import UserError
from lockstep.rl.reinforce import reinforce
from lockstep.train.pretrain import pretrain
from lockstep.train.sft import finetune

PRETRAIN, SFT = PretrainConfig(), SFTConfig(model="m", data="d")
RL, SERVE = RLConfig(model="m"), ServeConfig(model="m")


def _changed(config, name, value):
    """As a TOML file may: no type is checked."""
    changed = part = copy.deepcopy(config)
    *parts, last = name.split(".")
    for step in parts:
        part = getattr(part, step)
    setattr(part, last, value)
    return changed


def _numbers(config, prefix=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + field.name, value


UNBOUNDED = ["parallel." + name for name in ("data_replicate", "data_shard", "context", "tensor", "pipeline")]
"""Refused where the number of ranks is known."""


@pytest.mark.slow
@pytest.mark.parametrize("config", [PRETRAIN, SFT, RL, SERVE], ids=lambda c: type(c).__name__)
def test_every_number_is_finite_and_has_a_lower_bound(config):
    validate(config)
    for name, value in _numbers(config):
        if name not in UNBOUNDED:
            with pytest.raises(UserError, match=f"{name} is -7; it must be"):
                validate(_changed(config, name, -7))
        for wrong in (float("nan"), float("inf")) if isinstance(value, float) else (value + 0.5, None, True):
            with pytest.raises(UserError, match=f"{name} is {wrong}; it must be (finite|a whole number)"):
                validate(_changed(config, name, wrong))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (PRETRAIN, {"train.epsilon": -1e-8}, "train.epsilon is -1e-08; it must be 0 or more"),
        (PRETRAIN, {"seed": -1}, "seed is -1; it must be 0 or more"),
        (RL, {"seed": 2**63}, "seed is 9223372036854775808; it must be below 9223372036854775808"),
        (PRETRAIN, {"train.learning_rate": float("inf")}, "train.learning_rate is inf; it must be finite"),
        (PRETRAIN, {"train.beta2": 1.0}, "train.beta2 is 1.0; it must be below 1"),
        (PRETRAIN, {"train.schedule": "cosin"}, 'train.schedule is "cosin"; give constant, linear, cosine, wsd or'),
        (PRETRAIN, {"train.schedule": "csv"}, "csv needs a file"),
        (PRETRAIN, {"train.decay_share": 2}, "decay_share is 2"),
        (PRETRAIN, {"train.optimizer_in_backward": True}, "set max_grad_norm = 0"),
        (PRETRAIN, {"train.optimizer_in_backward": True, "train.optimizer": "muon"}, "works only with adamw"),
        (PRETRAIN, {"steps": "ten"}, "steps is 'ten'; it must be a whole number"),
        (PRETRAIN, {"template": "\udcff {text}"}, "which is not valid UTF-8; correct it"),
        (PRETRAIN, {"train.rules": ("*norm*",)}, 'train.rules "*norm*"'),
        (PRETRAIN, {"train.rules": ("* learning_rat=1",)}, 'train.rules "* learning_rat=1"'),
        (PRETRAIN, {"parallel.pipeline_schedule": "zbw"}, '"zbw" is unknown. Did you mean "zbv"'),
        (PRETRAIN, {"parallel.expert_dispatcher": "deep_ep"}, "needs parallel.expert or parallel.tensor above 1"),
        (PRETRAIN, {"parallel.expert_dispatcher": "deepep"}, "deep_ep"),
        (PRETRAIN, {"faults.on_spike": "rollback"}, "checkpoint.every is 0, so there would be no checkpoint"),
        (PRETRAIN, {"train.decay_share": 0.5}, "only the schedule wsd uses it, not cosine"),
        (PRETRAIN, {"validation_every": 5}, "validation_every is 5, but validation_data is empty"),
        (PRETRAIN, {"checkpoint.keep_every": 5}, "checkpoint.every 0 does not write"),
        (PRETRAIN, {"lora.targets": ["q_proj"]}, "it would have no effect"),
        (SFT, {"lora.alpha": 32.0}, "lora.rank is 0, so there is no adapter"),
        (RL, {"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        (RL, {"clip_low": 1.1}, "clip_low is 1.1; it must be 1 or less"),
        (RL, {"actors.max_staleness": 1}, "which the training ranks cannot do; give actors.generators too"),
        (RL, {"actors.tensor": 2}, "give actors.generators or actors.port too"),
        (RL, {"actors.tensor": 3}, "actors.tensor is 3; give 1, 2, 4 or 8"),
        (RL, {"actors.host": ""}, "actors.host is empty, which would mean every address"),
        (RL, {"actors.generators": 5000}, "actors.generators is 5000; it must be 1024 or less"),
        (RL, {"dry_run": 8, "actors.urls": ("http://127.0.0.1:1",)}, "a dry run cannot inspect the servers"),
        (SERVE, {"port": 65536}, "port is 65536; it must be 65535 or less"),
        (
            PRETRAIN,
            {"train.optimizer_in_backward": True, "train.max_grad_norm": 0.0, "parallel.pipeline": 2},
            "which computes a weight's gradient",
        ),
        (
            PRETRAIN,
            {"train.deterministic_layout": True, "parallel.pipeline": 2, "parallel.context": 2},
            "not with both; switch it off",
        ),
        (
            PRETRAIN,
            {"train.deterministic_layout": True, "parallel.reduce_gradients": "step"},
            'leave parallel.reduce_gradients at "auto"',
        ),
        *(
            (config, {f"parallel.{name}": value for name, value in layout.items()}, message)
            for config in (PRETRAIN, RL)
            for layout, message in (
                (
                    {"pipeline": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 1},
                    "needs 2 or more",
                ),
                ({"pipeline": 2, "reduce_gradients": "microbatch"}, 'leave it at "auto"'),
                ({"pipeline": 2, "full_dtensor": True}, "full_dtensor has no stages, but parallel.pipeline is 2"),
                ({"cpu_offload": True, "full_dtensor": True}, "parallel.cpu_offload needs FSDP"),
                ({"expert": 2, "full_dtensor": True}, "full_dtensor does not work with parallel.expert"),
            )
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused_by_name(config, changes, message):
    for name, value in changes.items():
        config = _changed(config, name, value)
    with pytest.raises(UserError) as refused:
        validate(config)
    assert message in str(refused.value)


UNUSED = [
    *(PretrainConfig(**{name: 5}) for name in ("validation_every", "validation_tokens")),
    PretrainConfig(train=TrainConfig(decay_share=0.5)),
    PretrainConfig(train=TrainConfig(decay_shape="sqrt")),
    PretrainConfig(checkpoint=CheckpointConfig(keep_every=5)),
    *(SFTConfig(model="m", data="d", lora=lora) for lora in (LoraConfig(alpha=32.0), LoraConfig(targets=("q_proj",)))),
    *(
        RLConfig(model="m", **settings)
        for settings in (
            *({name: 0.5} for name in ("gae_gamma", "gae_lambda", "value_coefficient", "value_clip")),
            *(dict(value_learning_rate=0.5), dict(value_detached=True)),
            *(dict(algorithm="rloo", clip_low=0.5), dict(algorithm="rloo", clip_high=0.5)),
            *(dict(kl_in="reward"), dict(kl_estimator="k2"), dict(kl_reference="average"), dict(kl_average_decay=0.5)),
            dict(kl_coefficient=0.1, kl_average_decay=0.5),
            *(dict(off_policy_level="sequence"), dict(off_policy_low=0.1), dict(off_policy_high=1.5)),
            dict(off_policy="none", off_policy_low=0.1, actors=ActorsConfig(urls=("http://127.0.0.1:1",))),
            dict(reward_model_weight=0.5),
            dict(validation_examples=0, validation_samples=2),
            dict(validation_examples=0, validation_temperature=0.0),
            dict(validation_examples=0, validation_seed=1),
        )
    ),
]


@pytest.mark.parametrize("config", UNUSED, ids=lambda config: str(UNUSED.index(config)))
def test_a_setting_without_effect_is_refused_with_what_to_do_unless_the_run_is_resumed(config):
    with pytest.raises(UserError, match="it would have no effect; leave it out") as refused:
        validate(config)
    ((name, usual),) = re.findall(r"- ([a-z_.]+) is .*leave it out(?:, or set it to (.*))?", str(refused.value))
    value = tomllib.loads(f"value = {usual}")["value"] if usual else None
    validate(_changed(config, name, tuple(value) if isinstance(value, list) else value))
    validate(_changed(config, "resume", True))


def test_a_file_that_names_another_algorithm_has_that_algorithms_settings(tmp_path):
    before = RLConfig(algorithm="rloo", advantage="leave_one_out", loss="reinforce", kl_in="reward", kl_estimator="k1")
    (tmp_path / "other.toml").write_text('algorithm = "grpo"\nsteps = 2\nclip_low = 0.1\n')
    assert from_toml(tmp_path / "other.toml", before) == RLConfig(algorithm="grpo", steps=2, clip_low=0.1)
    (tmp_path / "same.toml").write_text('algorithm = "rloo"\nsteps = 2\n')
    assert from_toml(tmp_path / "same.toml", before) == dataclasses.replace(before, steps=2)
    valued = RLConfig(algorithm="ppo", value_learning_rate=5.0, value_detached=True)
    assert from_toml(tmp_path / "other.toml", valued) == RLConfig(algorithm="grpo", steps=2, clip_low=0.1)


def test_overwriting_spares_all_that_a_run_reads(tmp_path):
    run = tmp_path / "run"
    (run / "parts").mkdir(parents=True)
    for name in ("parts/a.txt", "schedule.csv", "config.json", "task.py"):
        (run / name).write_text("{}")
    (tmp_path / "adapter").mkdir()
    base = {"base_model_name_or_path": str(run), "r": 1, "peft_type": "LORA"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(base))
    inside = {
        "data": [str(run / "parts"), f"{run}/parts/*.txt", f"{run}/**/*.txt=0.5,elsewhere.txt", f"{run}/parts/a.txt=2"],
        "model": [str(tmp_path / "adapter"), str(run)],
        "train.schedule_file": [str(run / "schedule.csv")],
    }
    for name, values in inside.items():
        for value in values:
            config = _changed(PretrainConfig(output=str(run), overwrite=True), name, value)
            with pytest.raises(UserError, match=rf"{name} .* is in .*run, which --overwrite would empty"):
                validate(config)
    rl = RLConfig(model="m", output=str(run), overwrite=True, environment=f"{run}/task.py:Task")
    with pytest.raises(UserError, match="environment .* is in"):
        validate(rl)
    outside = PretrainConfig(output=str(run / "other"), overwrite=True, data=f"{run}/parts/*.txt", model=str(run))
    validate(outside)


def test_a_folder_that_is_called_as_a_setting_is_may_be_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("byte", "grpo", "gsm8k", "qwen3", "auto", "start", "linear"):
        (tmp_path / name).mkdir()
        validate(RLConfig(model="qwen3:micro", output=name, overwrite=True, environment="gsm8k", kl_reference="start"))
        validate(PretrainConfig(output=name, overwrite=True, model="qwen3:micro"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("recompute.keep", "attention", "recompute.keep is 'attention'; it must be a list, each item text"),
        ("observe.profile_steps", 1, "observe.profile_steps is 1; it must be a list, each item a whole number"),
        ("observe.profile_steps", ("x",), r"profile_steps is \('x',\); it must be a list"),
        ("train.rules", "*norm* weight_decay=0.1", "train.rules is '.*'; it must be a list, each item text"),
        ("data", None, "data is None; it must be text"),
        ("output", ("a\0b",), r"output is \('a.x00b',\); it must be text"),
    ],
)
def test_one_value_is_no_list_and_nothing_is_no_text(tmp_path, name, value, message):
    config = _changed(PretrainConfig(), name, value)
    with pytest.raises(UserError, match=message):
        validate(config)
    if value is None or isinstance(value, tuple):
        return
    group, _, key = name.partition(".")
    (tmp_path / "c.yaml").write_text(f"{group}:\n  {key}: {json.dumps(value)}\n")
    with pytest.raises(UserError, match=rf"c\.yaml: {message}"):
        from_toml(tmp_path / "c.yaml", PretrainConfig())


def test_a_run_refuses_the_settings_of_another_command_and_dry_runs(tmp_path):
    for run, config in ((pretrain, RLConfig()), (pretrain, {}), (finetune, PretrainConfig()), (reinforce, SFTConfig())):
        with pytest.raises(UserError, match=r"this run takes a \w+Config, not "):
            run(config)
    for run, config in ((pretrain, PretrainConfig(dry_run=8)), (reinforce, RLConfig(model="m", dry_run=8))):
        with pytest.raises(UserError, match="dry_run is 8, but this call would train"):
            run(config)


def test_how_to_treat_the_folder_is_ignored_in_a_file_with_a_warning(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("overwrite: true\ndry_run: 4\nsteps: 0\nresume: false\n")
    (tmp_path / "t.txt").write_text("some text to learn from. " * 50)
    arguments = ["--model", "qwen3:micro", "--data", str(tmp_path / "t.txt"), "--output", str(tmp_path / "run")]
    length = ["--tokens-per-step", "256", "--sequence-length", "32"]
    assert main(["pretrain", "--config", str(tmp_path / "c.yaml"), *arguments, *length]) == 0
    printed = capsys.readouterr().err
    for name in ("overwrite", "dry_run"):
        assert f"c.yaml: {name} is ignored in a file; give it on the command line" in printed
    assert "resume is not taken" not in printed


COMMANDS = {
    "pretrain": PretrainConfig, "sft": SFTConfig, "dpo": DPOConfig, "reward-model": RewardModelConfig, "rl": RLConfig,
}  # fmt: skip


@pytest.mark.parametrize(("command", "other"), list(itertools.permutations(COMMANDS, 2)))
def test_a_run_of_another_command_is_not_resumed(tmp_path, capsys, command, other):
    (tmp_path / "config.toml").write_text(to_toml(COMMANDS[other](output=str(tmp_path))))
    assert main([command, "--resume", "--output", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert f"{tmp_path}: is a run of lockstep {other}, which lockstep {command} cannot resume" in printed
    assert f"continue it with lockstep {other} --resume --output {tmp_path}" in printed
    assert recorded_run(tmp_path, COMMANDS[other]()) is not None


def test_an_old_name_of_a_setting_in_a_recorded_run_or_a_file_is_answered_with_the_new_name(tmp_path, capsys):
    old = to_toml(RLConfig(output=str(tmp_path))).replace("updates_per_batch", "inner_steps")
    (tmp_path / "config.toml").write_text(old)
    message = 'config.toml: unknown key "inner_steps". In Lockstep it is updates_per_batch'
    for option in (["--resume", "--output", str(tmp_path)], ["--config", str(tmp_path / "config.toml")]):
        assert main(["rl", *option]) == 2 and message in capsys.readouterr().err
