"""`lockstep reward-model`: scores learned from pairs, a folder that transformers loads, ranks that agree with one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from lockstep import Engine, build_model, load_model, save_model
from lockstep.checkpoint import folder_if_model
from lockstep.checkpoint.convert import convert
from lockstep.cli import main
from lockstep.config import DPOConfig, LoraConfig, ParallelConfig, RewardModelConfig
from lockstep.data import load_tokenizer
from lockstep.data.preferences import AnswerTokens, Example
from lockstep.errors import UserError
from lockstep.model import preset, read_config
from lockstep.model.families import FAMILIES
from lockstep.model.families.registry import scoring_class
from lockstep.parallel import World
from lockstep.train.dpo import prefer
from lockstep.train.preferences import end_scores, preference_batch, with_end_target
from lockstep.train.reward_model import train_reward_model
from tests.parallel.launch import launch
from tests.train.runs import logged, write_lines
from tests.train.test_dpo import PAIRS, settings_of

ALONE = World(torch.device("cpu"))


def _config(tmp_path, folder, name, lines=PAIRS, **changes):
    return RewardModelConfig(**settings_of(tmp_path, folder, name, lines, **changes))


def _newest(run):
    return Path(folder_if_model(str(run)))


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("reward")
    held_out = write_lines(folder / "held.jsonl", PAIRS)
    return train_reward_model(_config(folder, model_folder, "run", steps=8, validation_data=held_out))


def _score(model, texts):
    """Of each alone, by the model's own forward pass."""
    batch = [Example((AnswerTokens(t, [1]), AnswerTokens(t, [1])), False) for t in texts]
    with torch.no_grad():
        return [
            end_scores(model, preference_batch([with_end_target(e)], ALONE, False, "first"))[0].item() for e in batch
        ]


def _their_scores(folder, texts):
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [theirs(torch.tensor([t])).logits.item() for t in texts]


def test_a_run_learns_and_transformers_scores_as_it_does(run, tmp_path):
    assert logged(run)[0] > 0.5 and logged(run)[-1] < 0.1 and logged(run, "scores/accuracy")[-1] == 1.0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation/scores/accuracy"] == 1.0 and last["validation/loss"] < 0.1
    margin = last["validation/scores/chosen"] - last["validation/scores/rejected"]
    assert last["validation/scores/margin"] == pytest.approx(margin) and margin > 2

    folder = _newest(run)
    model, tokenizer = load_model(folder, dtype="float32"), load_tokenizer(folder)
    assert model.config.score_head and read_config(folder).score_head
    texts = [
        [*tokenizer.encode(p["prompt"] + p[kind]), tokenizer.eos_id] for p in PAIRS for kind in ("chosen", "rejected")
    ]
    ours = _score(model, texts)
    assert ours == pytest.approx(_their_scores(folder, texts), abs=1e-4)
    assert all(chosen > rejected for chosen, rejected in zip(ours[::2], ours[1::2]))
    save_model(load_model(folder), tmp_path / "again")
    again = load_model(tmp_path / "again", dtype="float32")
    assert again.config == model.config
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_run_resumes_to_the_same_bits_says_which_settings_differ_and_another_begins_from_it(
    run, tmp_path, model_folder, caplog
):
    shutil.copytree(run, tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step_00000008")
    train_reward_model(_config(tmp_path, model_folder, "stopped", steps=8, resume=True))
    assert logged(tmp_path / "stopped") == logged(run)
    train_reward_model(_config(tmp_path, model_folder, "stopped", steps=9, centering=0.5, resume=True))
    assert "resumes with different settings: steps 9, was 8; centering 0.5, was 0.0" in caplog.text
    further = train_reward_model(_config(tmp_path, run, "further", steps=1))
    assert logged(further)[0] < logged(run)[0]


LAYOUTS = [
    (2, ParallelConfig(tensor=2)),
    pytest.param(4, ParallelConfig(context=2, tensor=2), marks=pytest.mark.slow),
    pytest.param(4, ParallelConfig(pipeline=2, tensor=2), marks=pytest.mark.slow),
]
"""Some of those on which preferences are trained, which are tried more often."""


@pytest.mark.parametrize(("ranks", "parallel"), LAYOUTS)
def test_ranks_follow_one_process_and_a_deterministic_layout_has_its_bits(tmp_path, model_folder, ranks, parallel):
    alone, steps = ParallelConfig(reduction_chunks=2), dict(steps=2)
    one = train_reward_model(_config(tmp_path, model_folder, "one", parallel=alone, **steps))
    exact = _config(tmp_path, model_folder, "exact", parallel=alone, **steps)
    exact.train.deterministic_layout, exact.train.tokens_per_microbatch = True, 64
    train_reward_model(exact)
    launch(ranks, train_reward_model, _config(tmp_path, model_folder, "many", parallel=parallel, **steps))
    launch(ranks, train_reward_model, replace(exact, output=str(tmp_path / "exact many"), parallel=parallel))
    # The step's sums are added in another order, in float32.
    for name, tolerance in (("loss", 1e-4), ("scores/margin", 1e-3), ("grad_norm", 1e-4)):
        assert logged(tmp_path / "many", name) == pytest.approx(logged(one, name), rel=tolerance), name
    for name in ("loss", "grad_norm", "scores/margin"):
        assert logged(tmp_path / "exact many", name) == logged(tmp_path / "exact", name), name
    first, second = (load_model(_newest(tmp_path / name)) for name in ("exact", "exact many"))
    for (name, own), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(own, other), name


def test_an_adapter_is_trained_with_its_head_and_resumes_to_the_same_bits(tmp_path, model_folder):
    settings = dict(lora=LoraConfig(rank=4), steps=3)
    whole = train_reward_model(_config(tmp_path, model_folder, "whole", **settings))
    losses, folder = logged(whole), _newest(whole)
    assert losses[-1] < 0.5 * losses[0]
    saved = load_file(folder / "adapter_model.safetensors")
    assert not list(folder.glob("model*")) and len(saved) == 2 * 7 * 2 + 1
    shutil.copytree(whole, tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step_00000003")
    again = train_reward_model(_config(tmp_path, model_folder, "stopped", resume=True, **settings))
    assert logged(again) == losses
    resumed = load_file(_newest(again) / "adapter_model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in saved.items())
    # Without a rank the adapter and its head are trained on; a head that is there already is where it begins.
    further = train_reward_model(_config(tmp_path, whole, "further", steps=1))
    convert(folder, tmp_path / "merged", dtype="float32", merge=True)
    beside = train_reward_model(_config(tmp_path, tmp_path / "merged", "beside", lora=LoraConfig(rank=2), steps=1))
    assert logged(further)[0] < losses[-1] and logged(beside)[0] == pytest.approx(logged(further)[0], rel=1e-3)
    texts = [[5, 6, 7, 8, 9, 10, 11] * 3, [100, 3, 7]]
    merged, apart = (load_model(at, dtype="float32") for at in (tmp_path / "merged", folder))
    assert merged.config.lora is None and merged.config.score_head
    # The update is rounded into the weight once; float32 has 24 bits.
    assert _score(merged, texts) == pytest.approx(_score(apart, texts), abs=1e-4)
    onto_a_head = _newest(beside)
    assert load_model(onto_a_head).config.score_head
    convert(onto_a_head, tmp_path / "twice", merge=True)
    named = load_file(tmp_path / "twice" / "model.safetensors"), load_file(onto_a_head / "adapter_model.safetensors")
    assert torch.equal(named[0]["score.weight"], named[1]["base_model.model.score.weight"])


def test_what_cannot_become_a_reward_model_is_refused_by_name(tmp_path, model_folder, capsys):
    of_dpo = DPOConfig(**settings_of(tmp_path, model_folder, "dpo", steps=1, lora=LoraConfig(rank=2)))
    with pytest.raises(UserError, match="is a language model's adapter; merge it first"):
        train_reward_model(_config(tmp_path, prefer(of_dpo), "run"))
    data = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    command = ["reward-model", "--model", str(model_folder), "--data", data, "--output", str(tmp_path / "run")]
    for options, message in (
        (["--centering", "-1"], "centering is -1"),
        (["--model", "qwen3:micro"], "qwen3:micro: no such folder"),
    ):
        assert main(command + options) == 2
        assert message in capsys.readouterr().err


def test_a_reward_model_is_no_language_model_and_says_so(run, tmp_path, capsys):
    folder = str(run)
    for command in (
        ["generate", "--model", folder, "--prompt", "a"],
        ["sft", "--model", folder, "--data", write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])],
        ["pretrain", "--model", folder, "--dry-run", "2"],
        ["rl", "--model", folder, "--environment", "digit_sum", "--output", str(tmp_path / "rl")],
    ):
        assert main(command) == 2, command
        message = capsys.readouterr().err
        assert folder in message and "is a reward model, which scores a text" in message, command
    with pytest.raises(UserError, match="is a reward model"):
        Engine(load_model(_newest(run)))
    config = json.loads((_newest(run) / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b"}
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the head has 2 outputs"):
        load_model(tmp_path / "two")


KNOWN = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
SCORING = [name for name, module in FAMILIES.items() if module.MODEL_TYPE in KNOWN]
"""The families for which transformers has a class with a score head."""


@pytest.mark.parametrize("family", SCORING)
def test_every_family_scores_as_transformers_does(tmp_path, family):
    shape = replace(preset(f"{family}:micro", 258), num_layers=4, score_head=True, tie_embeddings=False)
    model = build_model(shape, "float32", seed=1)
    save_model(model, tmp_path)
    texts = [[5, 6, 7, 8, 9, 10, 11] * 3, [100, 3, 7]]
    assert _score(model, texts) == pytest.approx(_their_scores(tmp_path, texts), abs=1e-5)


def test_a_reward_models_class_is_that_of_transformers():
    for family in SCORING:
        module = FAMILIES[family]
        assert scoring_class(module) == KNOWN[module.MODEL_TYPE]
