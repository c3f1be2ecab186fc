"""The load of experts is counted once per token, balanced, reported, and part of a checkpoint."""

import json
import logging
import shutil

import pytest
import torch

from lockstep import build_model, ops
from lockstep.config import CheckpointConfig, PretrainConfig, TrainConfig
from lockstep.model import preset
from lockstep.observe import expert_load_png, read_metrics
from lockstep.train import Trainer, pack
from lockstep.train.expert_balance import DEAD_STEPS, balance_problems
from lockstep.train.objective import NextTokenLoss
from lockstep.train.pretrain import pretrain

ROWS = [list(range(3, 40)), list(range(60, 100)), [7, 9, 7, 9, 11]]
TARGETS = sum(len(row) - 1 for row in ROWS)


def trainer_of(model=None, **settings):
    model = model or build_model(preset("qwen3_moe:micro", 128), "float32", seed=1)
    return Trainer(model, TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", **settings), 100)


def step(trainer, microbatches=1):
    rows = [ROWS] if microbatches == 1 else [[row] for row in ROWS]
    return trainer.step([pack(each) for each in rows], NextTokenLoss(TARGETS))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_each_token_is_counted_once_in_every_layer(microbatches):
    trainer = trainer_of()
    step(trainer, microbatches)
    assert trainer.balance.load.sum(-1).tolist() == [2 * sum(map(len, ROWS))] * 4


def test_recomputed_layers_are_not_counted_twice():
    from lockstep.config import RecomputeConfig
    from lockstep.parallel.recompute import apply_recompute

    plain, recomputed = trainer_of(), trainer_of()
    apply_recompute(recomputed.model, RecomputeConfig(mode="full"))
    step(plain), step(recomputed)
    assert torch.equal(plain.balance.load, recomputed.balance.load) and plain.balance.load.sum() > 0


def test_penalties_are_the_gradients_of_their_losses():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 6, generator=generator)
    counts = torch.randint(4, (40,), generator=generator)  # 0 is padding, and 2 and 3 are shared by as many sequences
    load = ops.ExpertLoad(6, active=2)
    load.end_step(torch.tensor([30, 5, 10, 15, 20, 0]))
    load.auxiliary, load.z, load.tokens = 0.3, 0.2, int(counts.sum())
    wide = logits.double().requires_grad_()
    tokens = wide.repeat_interleave(counts, 0)
    shares = torch.tensor([30, 5, 10, 15, 20, 0]).double() / 40  # of 40 tokens with two choices each
    auxiliary = 6 * (shares * tokens.softmax(-1).mean(0)).sum()
    loss = 0.3 * auxiliary + 0.2 * tokens.logsumexp(-1).square().mean()
    (expected,) = torch.autograd.grad(loss, wide)
    # float32's rounding
    torch.testing.assert_close(load.penalty(logits, counts).double(), expected, rtol=1e-4, atol=1e-8)


def uneven_model():
    model = build_model(preset("qwen3_moe:micro", 128), "float32", seed=1)
    with torch.no_grad():
        for block in model.layers:
            block.mlp.gate.weight.mul_(20)
    return model


def test_the_auxiliary_loss_evens_the_load_out():
    without, with_it = trainer_of(uneven_model()), trainer_of(uneven_model(), router_auxiliary=0.05)
    ends = [[step(trainer) for _ in range(25)][-1]["experts/load_mean"] for trainer in (without, with_it)]
    assert ends[1] < 0.8 * ends[0]


def test_a_resumed_trainer_has_the_bits_of_one_that_went_on():
    trainer = trainer_of(router_auxiliary=0.05, router_z=0.01)
    for _ in range(2):
        step(trainer)
    other = trainer_of(router_auxiliary=0.05, router_z=0.01)
    other.optimizer.load_state_tensors({n: t.clone() for n, t in trainer.optimizer.state_tensors().items()})
    with torch.no_grad():
        for mine, theirs in zip(other.model.parameters(), trainer.model.parameters()):
            mine.copy_(theirs)
    other.load_counts(trainer.counts())
    assert step(trainer) == step(other)
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), other.model.parameters()))


def test_an_expert_without_tokens_is_called_dead(caplog):
    trainer = trainer_of()
    trainer.balance.idle_steps[:, 3] = DEAD_STEPS - 1
    trainer.balance.routers[2].load.counted[:] = torch.tensor([5, 5, 5, 0, 5, 5, 5, 5])
    with caplog.at_level(logging.WARNING):
        metrics = trainer.balance.end_step(updated=True)
    assert metrics["experts/dead"] >= 1 and metrics["alarm/dead_experts"] == 1
    assert "got no token for 20 steps" in caplog.text


def test_a_bias_rises_for_an_expert_with_less_than_the_mean():
    from lockstep.train.expert_balance import moved

    assert moved(torch.tensor([9, 1, 5, 5])).tolist() == [-1, 1, 0, 0]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("qwen3:micro", dict(router_auxiliary=0.1), "the model is dense"),
        ("qwen3:micro", dict(router_z=0.1), "the model is dense"),
        ("qwen3_moe:micro", dict(router_bias_rate=0.1), "which this model does not have"),
    ],
)
def test_what_a_model_has_no_use_for_is_refused(model, settings, message):
    (problem,) = balance_problems(TrainConfig(**settings), preset(model, 128))
    assert message in problem


def test_a_run_writes_the_load_of_each_expert_and_resumes_with_it(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 80)

    def run(output, **settings):
        config = PretrainConfig(
            output=str(tmp_path / output), model="qwen3_moe:micro", data=str(text), dtype="float32", steps=4,
            tokens_per_step=256, sequence_length=64, train=TrainConfig(router_auxiliary=0.01), **settings,
        )  # fmt: skip
        pretrain(config)
        return read_metrics(tmp_path / output / "metrics.jsonl")

    every = CheckpointConfig(every=2, asynchronous=False)
    metrics = run("whole", checkpoint=every)
    assert all(m["experts/load_max"] >= m["experts/load_mean"] >= 1 for m in metrics)
    assert "Expert load" in (tmp_path / "whole" / "report.html").read_text()
    loads = [json.loads(line) for line in (tmp_path / "whole" / "expert_load.jsonl").read_text().splitlines()]
    assert [line["step"] for line in loads] == [1, 2, 3, 4]
    for line, m in zip(loads, metrics):
        # Two choices of each of 256 tokens in each of 4 layers of 8 experts.
        assert [(len(layer), sum(layer)) for layer in line["load"]] == [(8, 512)] * 4
        assert max(max(layer) for layer in line["load"]) / 64 == m["experts/load_max"]
    expert_load_png(str(tmp_path / "whole"), tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000004")
    again = run("cut", checkpoint=every, resume=True)
    assert (tmp_path / "cut" / "expert_load.jsonl").read_text() == (
        tmp_path / "whole" / "expert_load.jsonl"
    ).read_text()
    assert [m["loss"] for m in again] == [m["loss"] for m in metrics]
    assert [m["experts/load_max"] for m in again] == [m["experts/load_max"] for m in metrics]
