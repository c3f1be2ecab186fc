"""The trainer: float32 masters, micro-batches that do not matter, runs that learn and resume, log-probabilities."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import lockstep
from lockstep import build_model, score
from lockstep.config import CheckpointConfig, DataConfig, TrainConfig
from lockstep.data import Row
from lockstep.errors import UserError
from lockstep.model import preset, save_model
from lockstep.train import Trainer, log_probs, pack, pack_rows, split_by_tokens
from lockstep.train.objective import NextTokenLoss
from lockstep.train.pretrain import pretrain
from tests.train.runs import TEXT, logged, text_run

SEQUENCES = [[1, 2, 3, 4, 5], list(range(50, 90)), [7, 7], [9, 8, 7, 6]]
TARGETS = sum(len(s) - 1 for s in SEQUENCES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_scores_the_same_bits_in_any_company(dtype):
    model = build_model(preset("qwen3:micro"), dtype=dtype)
    together = score(model, SEQUENCES)
    for sequence, expected in zip(SEQUENCES, together):
        assert torch.equal(score(model, [sequence])[0], expected)
    assert all(torch.equal(a, b) for a, b in zip(score(model, SEQUENCES, tokens_per_microbatch=6), together))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_micro_batches_add_up_to_the_whole_batch(dtype):
    gradients = []
    for limit in (1000, 8):
        model = build_model(preset("qwen3:micro"), dtype=dtype)
        trainer = Trainer(model, TrainConfig(), 1)
        parts = split_by_tokens([len(s) for s in SEQUENCES], limit)
        trainer.accumulate([pack(SEQUENCES[part]) for part in parts], NextTokenLoss(TARGETS))
        gradients.append([gradient.float() for gradient in trainer.optimizer.gradients.pending().values()])
    for whole, parts in zip(*gradients, strict=True):
        if dtype == "float32":
            # The same terms in another order.
            torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
        else:
            # Each micro-batch's gradient is rounded to 8 bits before it is added.
            assert (parts - whole).norm() < 2**-6 * whole.norm()


def test_bfloat16_trains_float32_masters_by_adamw():
    config = TrainConfig(learning_rate=1e-4, warmup_steps=0, schedule="constant", max_grad_norm=0.5, weight_decay=0.1)
    model = build_model(preset("qwen3:micro"), dtype="bfloat16")
    trainer = Trainer(model, config, 10)
    masters = {n: m.detach().clone().requires_grad_() for n, m in trainer.optimizer.masters.items()}
    decayed = [m for m in masters.values() if m.ndim > 1]
    other = [m for m in masters.values() if m.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(3):
        NextTokenLoss(TARGETS)(model, pack(SEQUENCES)).backward()
        for name, master in masters.items():
            master.grad = trainer.optimizer.gradients.pending()[name].float()
        torch.nn.utils.clip_grad_norm_(list(masters.values()), 0.5)
        expected.step()
        trainer.optimizer.update(1e-4, trainer.optimizer.gradient_norms()["grad_norm"])
    for name, parameter in model.named_parameters():
        # torch's fused and plain AdamW round in different places.
        torch.testing.assert_close(
            trainer.optimizer.masters[name].detach(), masters[name].detach(), rtol=1e-5, atol=1e-7
        )
        assert torch.equal(parameter, trainer.optimizer.masters[name].bfloat16()) and parameter.grad is None
    assert len({p.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_step_has_the_same_bits_whether_its_gradients_stay_narrow_or_are_widened_into_the_last_steps_memory(
    optimizer,
):
    parts = [pack(SEQUENCES[part]) for part in (slice(2), slice(2, 3), slice(3, None))]

    def trainer():
        settings = TrainConfig(optimizer=optimizer, learning_rate=1e-3, warmup_steps=0, max_grad_norm=0.5)
        return Trainer(build_model(preset("qwen3:micro"), dtype="bfloat16"), settings, 10)

    one, other = trainer(), trainer()
    one.step(parts, NextTokenLoss(TARGETS))  # leaves memory of float32 sums
    other.optimizer.load_state_tensors({n: t.clone() for n, t in one.optimizer.state_tensors().items()})
    for rows, kinds in (([pack(SEQUENCES)], (torch.float32, torch.bfloat16)), (parts, (torch.float32,) * 2)):
        norms = []
        for each, kind in zip((one, other), kinds):
            each.accumulate(rows, NextTokenLoss(TARGETS))
            assert {grad.dtype for grad in each.optimizer.gradients.pending().values()} == {kind}
            norms.append(each.optimizer.gradient_norms())
            each.optimizer.update(1e-3, norms[-1]["grad_norm"])
        assert norms[0] == norms[1] and norms[0]["grad_norm"] > 0.5, "clipped"
        states = other.optimizer.state_tensors()
        assert all(torch.equal(tensor, states[name]) for name, tensor in one.optimizer.state_tensors().items())


def _config(tmp_path, name, **changes):
    train = TrainConfig(learning_rate=3e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=128)
    settings = dict(dtype="bfloat16", checkpoint=CheckpointConfig(every=2), train=train)
    return text_run(tmp_path, name, **(settings | changes))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_run_learns_and_resumes_to_the_same_bits_and_its_folder_is_nobody_elses(tmp_path, dtype):
    whole = pretrain(_config(tmp_path, "whole", dtype=dtype))
    losses = logged(whole)
    assert losses[-1] < losses[0] - 0.3
    assert (whole / "report.html").is_file() and (whole / "config.toml").is_file()
    # As if killed after step 3: the last checkpoint is that of step 2, and a half-written one lies about.
    shutil.copytree(whole, torn := tmp_path / "torn")
    (torn / "checkpoints" / "step_00000004").rename(torn / "checkpoints" / "step_00000004.partial")
    config = _config(tmp_path, "torn", dtype=dtype)
    with pytest.raises(UserError, match="already contains a run.*--resume.*--overwrite"):
        pretrain(config)
    pretrain(replace(config, resume=True))
    assert logged(torn) == losses
    with pytest.raises(UserError, match="torn is at step 4, but is to end at step 0, .* give more steps or epochs"):
        pretrain(replace(config, resume=True, steps=0))
    assert not (torn / "checkpoints" / "step_00000000").exists(), "its weights are those of step 4"
    pretrain(replace(config, overwrite=True, steps=1))
    assert logged(torn) == losses[:1]
    with pytest.raises(UserError, match="learning_rate is 0"):
        pretrain(_config(tmp_path, "other", train=TrainConfig(learning_rate=0)))
    assert not (tmp_path / "other").exists()


def test_a_micro_batch_of_padding_has_a_gradient_of_zero():
    model = build_model(preset("qwen3:micro"), dtype="float32")
    padding = Row(np.zeros(16, dtype=np.int64), [16], np.zeros(16, dtype=bool), padding=16)
    NextTokenLoss(3)(model, pack_rows([padding])).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("model_only", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_stops_where_the_data_ends_and_saves_there(tmp_path, model_only):
    checkpoint = CheckpointConfig(last_model_only=model_only)
    config = _config(tmp_path, "run", steps=50, loader=DataConfig(repeat=False), checkpoint=checkpoint)
    folder = pretrain(config, [TEXT * 13])
    assert (
        sum(logged(folder, "tokens")) == 586 and len(logged(folder)) == 3 and logged(folder, "data/padding")[-1] > 0.2
    )
    assert (folder / "checkpoints" / "step_00000003").is_dir()
    summary = json.loads((folder / "summary.json").read_text())
    config.resume = True
    # Nothing is left to do, also if it was killed before summary and report were written, or others were there.
    (folder / "summary.json").unlink()
    for age in (None, 0):
        (folder / "report.html").unlink() if age is None else os.utime(folder / "report.html", (age, age))
        pretrain(config, [TEXT * 13])
        assert (folder / "report.html").stat().st_mtime > 0 and len(logged(folder)) == 3
        assert json.loads((folder / "summary.json").read_text())["loss"] == summary["loss"]


ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8, 1, 8]]


@pytest.fixture(scope="module")
def model():
    return lockstep.build_model(preset("qwen3:micro", 64), dtype="float32", seed=1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_differentiable_log_probs_have_the_bits_of_score_and_of_the_engine(model, temperature):
    found = log_probs(model, ROWS, temperature)
    for each, scored, row in zip(found, lockstep.score(model, ROWS, temperature), ROWS):
        assert each.requires_grad and not scored.requires_grad and len(each) == len(row) - 1
        assert torch.equal(each.detach(), scored)
    params = lockstep.SamplingParams(max_tokens=9, seed=3, temperature=temperature, ignore_eos=True)
    (completion,) = lockstep.Engine(model).generate([ROWS[0]], params)[0]
    (found,) = log_probs(model, [ROWS[0] + completion.token_ids], temperature)
    assert torch.equal(found.detach()[len(ROWS[0]) - 1 :], torch.tensor(completion.logprobs))
    with pytest.raises(UserError, match="sequence 1"):
        log_probs(model, [[1, 2], [64]], temperature)
    with pytest.raises(UserError, match="temperature is -1.0; give a number of 0 or more"):
        log_probs(model, [[1, 2]], -1.0)
    assert log_probs(model, [], temperature) == lockstep.score(model, [], temperature) == []


def test_the_gradient_of_log_probs_is_that_of_transformers(model, tmp_path):
    save_model(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    weights = [torch.linspace(-1, 1, len(row) - 1) for row in ROWS]
    model.zero_grad()
    sum((w * each).sum() for w, each in zip(weights, log_probs(model, ROWS))).backward()
    total = torch.zeros(())
    for row, w in zip(ROWS, weights):
        logits = theirs(torch.tensor([row])).logits[0, :-1]
        total = total + (w * logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]).sum()
    total.backward()
    own = {name: p.grad for name, p in model.named_parameters()}
    compared = 0
    for name, parameter in theirs.named_parameters():
        if (mine := own.get(name.removeprefix("model."))) is not None:
            # Float32 sums in another order.
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-5)
            compared += 1
    assert compared == len(own)
