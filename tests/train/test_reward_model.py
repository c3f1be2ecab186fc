"""`lockstep reward-model`: scores learnt from pairs, a folder that transformers loads, ranks that agree with one."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep import Engine, build_model, load_model, save_model
from lockstep.checkpoint import folder_if_model
from lockstep.checkpoint.convert import convert
from lockstep.cli import main
from lockstep.config import (
    CheckpointConfig,
    CompileConfig,
    DataConfig,
    LoraConfig,
    ParallelConfig,
    RewardModelConfig,
)
from lockstep.data import load_tokenizer
from lockstep.data.preferences import AnswerTokens, Example
from lockstep.errors import UserError
from lockstep.model import hugging_face_name, preset, read_config
from lockstep.model.families import FAMILIES
from lockstep.parallel import World
from lockstep.train.dpo import prefer
from lockstep.train.preference_batches import end_scores, preference_batch, with_end_target
from lockstep.train.preference_losses import bradley_terry_loss
from lockstep.train.reward_model import train_reward_model
from tests.parallel.launch import launch
from tests.train.test_dpo import PAIRS, _config, _file, _metrics
from tests.train.test_sft import MARKED


def _reward_config(tmp_path, folder, name, lines=PAIRS, **changes):
    of_dpo = vars(_config(tmp_path, folder, name, lines))
    shared = {key: of_dpo[key] for key in ("output", "model", "data", "dtype", "steps", "tokens_per_step", "train")}
    options = shared | dict(sequence_length=64, checkpoint=CheckpointConfig(every=2))
    return RewardModelConfig(**(options | changes))


def _score(model, texts):
    """Of each alone, by the model's own forward pass."""
    batch = [Example((AnswerTokens(t, [1]), AnswerTokens(t, [1])), False, 0) for t in texts]
    with torch.no_grad():
        alone = [preference_batch([with_end_target(e)], World(torch.device("cpu")), False, "first") for e in batch]
        return [end_scores(model, each)[0].item() for each in alone]


def test_a_run_learns_and_transformers_scores_as_it_does(tmp_path, model_folder):
    from transformers import AutoModelForSequenceClassification

    held_out = _file(tmp_path, PAIRS, "held.jsonl")
    run = train_reward_model(_reward_config(tmp_path, model_folder, "run", steps=8, validation_data=held_out))
    assert _metrics(run)[0] > 0.5 and _metrics(run)[-1] < 0.1 and _metrics(run, "scores/accuracy")[-1] == 1.0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation/scores/accuracy"] == 1.0 and last["validation/loss"] < 0.1
    margin = last["validation/scores/chosen"] - last["validation/scores/rejected"]
    assert last["validation/scores/margin"] == pytest.approx(margin) and margin > 2

    folder = folder_if_model(str(run))
    model, tokenizer = load_model(folder, dtype="float32"), load_tokenizer(folder)
    assert model.config.score_head and read_config(Path(folder)).score_head
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    texts = [
        [*tokenizer.encode(p["prompt"] + p[kind]), tokenizer.eos_id] for p in PAIRS for kind in ("chosen", "rejected")
    ]
    ours = _score(model, texts)
    with torch.no_grad():
        expected = [theirs(torch.tensor([t])).logits.item() for t in texts]
    assert ours == pytest.approx(expected, abs=1e-4)
    assert all(chosen > rejected for chosen, rejected in zip(ours[::2], ours[1::2]))


@pytest.mark.parametrize("centering", [0.0, 0.5])
def test_loss_and_gradient_are_those_of_trl(tmp_path, model_folder, centering):
    import trl
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    config = _reward_config(tmp_path, model_folder, "run", steps=1, centering=centering)
    folder = train_reward_model(replace(config, train=replace(config.train, learning_rate=1e-12)))
    folder = Path(folder_if_model(str(folder)))
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype="float32")
    answers = [(p["prompt"], p["chosen"], p["rejected"]) for p in PAIRS[:3]]
    examples = [
        Example(tuple(AnswerTokens([*tokenizer.encode(p + a), tokenizer.eos_id], [1]) for a in both), False, number)
        for number, (p, *both) in enumerate(answers)
    ]
    batch = preference_batch([with_end_target(e) for e in examples], World(torch.device("cpu")), True)
    assert sum(batch.row.left_out) > 0
    chosen, rejected = end_scores(model, batch)[0].view(-1, 2).T
    loss = (bradley_terry_loss(chosen, rejected) + centering * (chosen + rejected).square()).mean()
    loss.backward()

    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    own = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    theirs.config.pad_token_id = 300  # in none of the texts
    arguments = trl.RewardConfig(
        output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none", disable_dropout=True,
        gradient_checkpointing=False, center_rewards_coefficient=centering or None,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in answers])
    trainer = trl.RewardTrainer(theirs, args=arguments, train_dataset=rows, processing_class=own)
    theirs.config.pad_token_id = 300
    sequences = [e.sequences[side].tokens for side in (0, 1) for e in examples]
    most = max(map(len, sequences))
    assert all(300 not in s for s in sequences)
    ids = torch.tensor([s + [300] * (most - len(s)) for s in sequences])
    mask = torch.tensor([[1] * len(s) + [0] * (most - len(s)) for s in sequences])
    their_loss = trainer.compute_loss(theirs, {"input_ids": ids, "attention_mask": mask})
    theirs.zero_grad()
    their_loss.backward()
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    found = {hugging_face_name(n): p.grad for n, p in model.named_parameters()}
    assert found.keys() == expected.keys() and "score.weight" in found
    for name, gradient in found.items():
        # Both sides sum in float32, in different orders.
        assert torch.dist(gradient, expected[name]) <= 1e-4 * expected[name].norm(), name


def test_a_run_resumes_to_the_same_bits_and_another_begins_from_it(tmp_path, model_folder):
    whole = train_reward_model(_reward_config(tmp_path, model_folder, "whole"))
    losses = _metrics(whole)
    assert len(set(losses)) == 4
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step_00000004")
    train_reward_model(_reward_config(tmp_path, model_folder, "stopped", resume=True))
    assert _metrics(stopped) == losses
    further = train_reward_model(_reward_config(tmp_path, whole, "further", steps=1))
    assert _metrics(further)[0] < losses[0]


def test_a_run_that_resumes_with_other_settings_says_which(tmp_path, model_folder, caplog):
    train_reward_model(_reward_config(tmp_path, model_folder, "run", steps=1))
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        run = train_reward_model(_reward_config(tmp_path, model_folder, "run", steps=2, centering=0.5, resume=True))
    assert "resumes with different settings: steps 2, was 1; centering 0.5, was 0.0" in caplog.text
    assert len(_metrics(run)) == 2


def test_conversations_are_scored_as_their_template_renders_them(tmp_path, model_folder):
    from transformers import PreTrainedTokenizerFast

    def said(role, text):
        return [{"role": role, "content": text}]

    lines = [
        {"prompt": said("user", p["prompt"])} | {kind: said("assistant", p[kind]) for kind in ("chosen", "rejected")}
        for p in PAIRS
    ]
    (tmp_path / "t.jinja").write_text(MARKED)
    once = dict(steps=1, loader=DataConfig(packing="whole", repeat=False), tokens_per_step=4096, sequence_length=2048)
    config = _reward_config(tmp_path, model_folder, "run", lines, template=str(tmp_path / "t.jinja"), **once)
    run = train_reward_model(replace(config, train=replace(config.train, learning_rate=1e-12)))
    folder = Path(folder_if_model(str(run)))
    tokenizer, model = PreTrainedTokenizerFast.from_pretrained(folder), load_model(folder, dtype="float32")
    for kind in ("chosen", "rejected"):
        texts = [tokenizer.apply_chat_template(line["prompt"] + line[kind])["input_ids"] for line in lines]
        # float32, and each score in other company.
        assert _metrics(run, f"scores/{kind}")[0] == pytest.approx(sum(_score(model, texts)) / len(lines), abs=1e-5)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(data_shard=2), marks=pytest.mark.slow),
        ParallelConfig(tensor=2),
        # As preferences are trained on such ranks, which are tried more often.
        *(pytest.param(ParallelConfig(**{name: 2}), marks=pytest.mark.slow) for name in ("context", "pipeline")),
    ],
    ids=["fsdp", "tensor", "context", "pipeline"],
)
def test_two_ranks_follow_one(tmp_path, model_folder, parallel):
    own = ParallelConfig(reduction_chunks=parallel.tensor)
    one = train_reward_model(_reward_config(tmp_path, model_folder, "one", steps=3, parallel=own))
    config = _reward_config(tmp_path, model_folder, "two", steps=3, parallel=parallel)
    launch(2, _train, config)
    # The step's sums are added in another order, in float32.
    assert _metrics(tmp_path / "two") == pytest.approx(_metrics(one), rel=1e-4)
    assert _metrics(tmp_path / "two", "scores/margin") == pytest.approx(_metrics(one, "scores/margin"), rel=1e-3)
    assert _metrics(tmp_path / "two", "grad_norm") == pytest.approx(_metrics(one, "grad_norm"), rel=1e-4)


LAYOUTS = {
    "fsdp": (2, ParallelConfig(reduction_chunks=2)),
    "tensor": (2, ParallelConfig(tensor=2)),
    "context": (2, ParallelConfig(context=2, reduction_chunks=2)),
    "pipeline": (2, ParallelConfig(pipeline=2, reduction_chunks=2)),
    "context and tensor": (4, ParallelConfig(context=2, tensor=2)),
    "pipeline and tensor": (4, ParallelConfig(pipeline=2, tensor=2)),
    "full DTensor": (2, ParallelConfig(tensor=2, full_dtensor=True)),
}


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[] if n == "tensor" else pytest.mark.slow) for n in LAYOUTS])
def test_a_deterministic_layout_has_the_bits_of_one_process(tmp_path, model_folder, layout):
    ranks, parallel = LAYOUTS[layout]
    train = _reward_config(tmp_path, model_folder, "").train
    settings = dict(steps=2, train=replace(train, deterministic_layout=True, tokens_per_microbatch=64))
    alone = ParallelConfig(reduction_chunks=2)
    one = train_reward_model(_reward_config(tmp_path, model_folder, "one", parallel=alone, **settings))
    launch(ranks, _train, _reward_config(tmp_path, model_folder, "two", parallel=parallel, **settings))
    for name in ("loss", "grad_norm", "scores/margin"):
        assert _metrics(tmp_path / "two", name) == _metrics(one, name), name
    first, second = (load_model(folder_if_model(str(tmp_path / name))) for name in ("one", "two"))
    for (name, own), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(own, other), name


@pytest.mark.slow
def test_compiled_layers_learn_the_same(tmp_path, model_folder):
    compiled = CompileConfig(backend="inductor")
    run = train_reward_model(_reward_config(tmp_path, model_folder, "run", compile=compiled))
    eager = train_reward_model(_reward_config(tmp_path, model_folder, "eager"))
    # What is compiled rounds elsewhere, in float32.
    assert _metrics(run) == pytest.approx(_metrics(eager), rel=1e-4)


def test_an_adapter_is_trained_with_its_head_and_resumes_to_the_same_bits(tmp_path, model_folder):
    settings = dict(lora=LoraConfig(rank=4), steps=3)
    whole = train_reward_model(_reward_config(tmp_path, model_folder, "whole", **settings))
    losses = _metrics(whole)
    assert losses[-1] < 0.5 * losses[0]
    folder = Path(folder_if_model(str(whole)))
    saved = load_file(folder / "adapter_model.safetensors")
    assert not list(folder.glob("model*")) and len(saved) == 2 * 7 * 2 + 1
    shutil.copytree(whole, tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step_00000003")
    again = train_reward_model(_reward_config(tmp_path, model_folder, "stopped", resume=True, **settings))
    assert _metrics(again) == losses
    resumed = load_file(Path(folder_if_model(str(again))) / "adapter_model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in saved.items())
    # Without a rank the adapter and its head are trained on; a head that is there already is where it begins.
    further = train_reward_model(_reward_config(tmp_path, whole, "further", steps=1))
    convert(folder, tmp_path / "merged", dtype="float32", merge=True)
    beside = train_reward_model(
        _reward_config(tmp_path, tmp_path / "merged", "beside", lora=LoraConfig(rank=2), steps=1)
    )
    assert _metrics(further)[0] < losses[-1] and _metrics(beside)[0] == pytest.approx(_metrics(further)[0], rel=1e-3)
    texts = [[5, 6, 7, 8, 9, 10, 11] * 3, [100, 3, 7]]
    merged, apart = (load_model(at, dtype="float32") for at in (tmp_path / "merged", folder))
    assert merged.config.lora is None and merged.config.score_head
    # The update is rounded into the weight once; float32 has 24 bits.
    assert _score(merged, texts) == pytest.approx(_score(apart, texts), abs=1e-4)
    onto_a_head = Path(folder_if_model(str(beside)))
    assert load_model(onto_a_head).config.score_head
    convert(onto_a_head, tmp_path / "twice", merge=True)
    named = load_file(tmp_path / "twice" / "model.safetensors"), load_file(onto_a_head / "adapter_model.safetensors")
    assert torch.equal(named[0]["score.weight"], named[1]["base_model.model.score.weight"])


def test_a_language_models_adapter_is_no_start(tmp_path, model_folder, capsys):
    config = _config(tmp_path, model_folder, "dpo", steps=1, lora=LoraConfig(rank=2))
    with pytest.raises(UserError, match="is a language model's adapter; merge it first"):
        train_reward_model(_reward_config(tmp_path, prefer(config), "run"))


def _train(config):
    train_reward_model(config)


def test_a_reward_model_is_no_language_model_and_says_so(tmp_path, model_folder, capsys):
    run = train_reward_model(_reward_config(tmp_path, model_folder, "run", steps=1))
    folder = str(run)
    for command in (
        ["generate", "--model", folder, "--prompt", "a"],
        ["sft", "--model", folder, "--data", _file(tmp_path, [{"prompt": "a", "completion": "b"}], "a.jsonl")],
        ["pretrain", "--model", folder, "--dry-run", "2"],
        ["rl", "--model", folder, "--environment", "digit_sum", "--output", str(tmp_path / "rl")],
    ):
        assert main(command) == 2, command
        said = capsys.readouterr().err
        assert folder in said and "is a reward model, which scores a text" in said, command
    with pytest.raises(UserError, match="is a reward model"):
        Engine(load_model(folder_if_model(str(run))))
    config = json.loads((Path(folder_if_model(str(run))) / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b"}
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the head has 2 outputs"):
        load_model(tmp_path / "two")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--centering", "-1"], "centering is -1"),
        (["--model", "qwen3:micro"], "qwen3:micro: no such folder"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, model_folder, capsys, options, message):
    data = _file(tmp_path, PAIRS)
    command = ["reward-model", "--model", str(model_folder), "--data", data, "--output", str(tmp_path / "run")]
    assert main(command + options) == 2
    assert message in capsys.readouterr().err


def test_a_model_is_written_and_read_as_it_was(tmp_path, model_folder):
    run = train_reward_model(_reward_config(tmp_path, model_folder, "run", steps=1))
    model = load_model(folder_if_model(str(run)))
    save_model(model, tmp_path / "again")
    again = load_model(tmp_path / "again")
    assert again.config == model.config
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_scores_as_transformers_does(tmp_path, family):
    from transformers import AutoModelForSequenceClassification

    shape = replace(preset(f"{family}:micro", 258), score_head=True, tie_embeddings=False)
    model = build_model(shape, "float32", seed=1)
    save_model(model, tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    texts = [[5, 6, 7, 8, 9, 10, 11] * 3, [100, 3, 7]]
    with torch.no_grad():
        expected = [theirs(torch.tensor([t])).logits.item() for t in texts]
    assert _score(model, texts) == pytest.approx(expected, abs=1e-5)
