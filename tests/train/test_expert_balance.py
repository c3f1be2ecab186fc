"""The load of experts is counted once per token, whatever stands beside it in a row, balanced, reported, and saved."""

import json
import logging
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from lockstep import build_model, ops
from lockstep.config import CheckpointConfig, CompileConfig, ParallelConfig, RecomputeConfig, TrainConfig
from lockstep.data.preferences import AnswerTokens, Example
from lockstep.data.rows import Row
from lockstep.model import initialize, preset
from lockstep.observe import read_metrics
from lockstep.parallel import World, apply_compile, close_world, open_world, parallel_model
from lockstep.parallel.recompute import apply_recompute
from lockstep.train import Trainer, pack
from lockstep.train.context import shard_row
from lockstep.train.expert_balance import DEAD_STEPS, balance_problems, moved
from lockstep.train.objective import NextTokenLoss
from lockstep.train.packing import pack_rows, pack_scored
from lockstep.train.preferences import preference_batch
from lockstep.train.pretrain import pretrain
from tests.parallel.launch import launch
from tests.train.runs import logged, text_run

START = [5, 6, 7, 8, 9, 10, 11]
ROWS = [START + list(range(20, 33)), START + list(range(40, 65)), [*START, 90, 91], list(range(70, 74))]
TARGETS = sum(len(row) - 1 for row in ROWS)
TOKENS = sum(map(len, ROWS))
SHAPE = replace(preset("qwen3_moe:micro", 128), num_layers=2)
BIASED = replace(preset("deepseek_v3:micro", 128), num_layers=2)
PENALTIES = dict(router_auxiliary=0.5, router_z=0.2)  # both far above what one uses


def padded(row, length):
    """As the loader brings a document that does not fill its row."""
    missing = length - len(row)
    lengths = [len(row), *([missing] if missing else [])]
    scored = np.array([False] + [True] * (len(row) - 1) + [False] * missing)
    return Row(np.array(row + [0] * missing), lengths, scored, padding=missing)


CUTS = {
    "one micro-batch": [pack(ROWS)],
    "one each": [pack([row]) for row in ROWS],
    "padding within the row": [pack_rows([padded(row, 40) for row in ROWS])],
    "padding, two each": [pack_rows([padded(row, 56) for row in ROWS[i : i + 2]]) for i in (0, 2)],
    "idle ones": [pack(ROWS[:3]), pack(ROWS[:1]).idle(), pack(ROWS[3:]), pack(ROWS[2:]).idle()],
}


class OnlyCounted(NextTokenLoss):
    """As a loss treats an idle micro-batch."""

    def __call__(self, model, row):
        return super().__call__(model, row) * (1.0 if row.counts.any() else 0.0)


LOSS = OnlyCounted(TARGETS)


def trainer_of(shape=SHAPE, backend="none", **settings):
    model = build_model(shape, "float32", seed=1)
    apply_compile(model, CompileConfig(backend))
    return Trainer(model, TrainConfig(learning_rate=1e-4, warmup_steps=0, schedule="constant", **settings), 100)


def stepped(cut, **settings):
    """The load of two steps, and the second's gradients, which the load of the first is in."""
    trainer = trainer_of(**settings, **PENALTIES)
    trainer.step(cut, LOSS)
    loads = [trainer.balance.load.clone()]
    trainer.balance.begin_step(cut)
    trainer.accumulate(cut, LOSS)
    gradients = {name: grad.clone() for name, grad in trainer.optimizer.gradients.pending().items()}
    trainer.balance.end_step(updated=False)
    return [*loads, trainer.balance.load], gradients


def compare(found, gradients):
    for name, gradient in gradients.items():  # whose sums round in another order
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


@pytest.fixture(scope="module")
def whole():
    return stepped(CUTS["one micro-batch"])


@pytest.mark.parametrize("cut", [*list(CUTS)[1:], pytest.param("compiled", marks=pytest.mark.slow)])
def test_loads_and_penalised_gradients_are_those_of_one_micro_batch(whole, cut):
    loads, gradients = whole
    assert [load.sum(-1).tolist() for load in loads] == [[2 * TOKENS] * 2] * 2, "each token once in every layer"
    others, found = stepped(CUTS["idle ones"], backend="inductor") if cut == "compiled" else stepped(CUTS[cut])
    assert all(map(torch.equal, loads, others))
    compare(found, gradients)


def test_choice_biases_move_by_the_load_of_tokens_alone():
    biases = []
    for cut in ("one each", "idle ones"):
        trainer = trainer_of(BIASED, router_bias_rate=0.1)
        trainer.step(CUTS[cut], LOSS)
        biases.append([router.e_score_correction_bias for router in trainer.balance.routers.values()])
    assert all(map(torch.equal, *biases)) and any(bias.any() for bias in biases[0])
    assert moved(torch.tensor([9, 1, 5, 5])).tolist() == [-1, 1, 0, 0]


def test_a_shared_start_counts_once_for_each_sequence_that_has_it_and_an_empty_micro_batch_for_nothing():
    scored = [list(range(8, len(row))) for row in ROWS[:3]]
    shared, apart = (pack_scored(ROWS[:3], scored, left_out) for left_out in ([0, 7, 7], None))
    assert len(shared.tokens) < len(apart.tokens)
    assert shared.counts[:8].tolist() == [3] * 7 + [1]
    (loads, gradients), (others, found) = stepped([apart]), stepped([shared])
    assert all(map(torch.equal, loads, others)) and loads[0].sum() == 2 * 2 * sum(len(row) - 1 for row in ROWS[:3])
    compare(found, gradients)
    answers, world = (AnswerTokens([*START, 1, 2], [7, 8]), AnswerTokens([*START, 3], [7])), World(torch.device("cpu"))
    assert preference_batch([], world, True).row.counts.sum() == 0
    for share in (True, False):  # what predicts nothing is left out
        assert preference_batch([Example(answers, True)], world, share).row.counts.sum() == 8 + 7


def test_recomputed_layers_are_not_counted_twice(whole):
    trainer = trainer_of()
    apply_recompute(trainer.model, RecomputeConfig(mode="full"))
    trainer.step(CUTS["one micro-batch"], LOSS)
    assert torch.equal(trainer.balance.load, whole[0][0])


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


def test_the_auxiliary_loss_evens_the_load_out():
    ends = []
    for auxiliary in (0.0, 0.05):
        model = build_model(SHAPE, "float32", seed=1)
        with torch.no_grad():
            for block in model.layers:
                block.mlp.gate.weight.mul_(20)
        settings = TrainConfig(learning_rate=3e-3, warmup_steps=0, schedule="constant", router_auxiliary=auxiliary)
        trainer = Trainer(model, settings, 100)
        ends.append([trainer.step(CUTS["one micro-batch"], LOSS) for _ in range(12)][-1]["experts/load_mean"])
    assert ends[1] < 0.8 * ends[0]


def test_a_resumed_trainer_has_the_bits_of_one_that_went_on():
    trainer, other = (trainer_of(**PENALTIES) for _ in range(2))
    for _ in range(2):
        trainer.step(CUTS["one each"], LOSS)
    other.optimizer.load_state_tensors({n: t.clone() for n, t in trainer.optimizer.state_tensors().items()})
    with torch.no_grad():
        for mine, theirs in zip(other.model.parameters(), trainer.model.parameters()):
            mine.copy_(theirs)
    other.load_counts(trainer.counts())
    assert trainer.step(CUTS["one each"], LOSS) == other.step(CUTS["one each"], LOSS)
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), other.model.parameters()))


def test_an_expert_without_tokens_is_called_dead(caplog):
    trainer = trainer_of()
    trainer.balance.idle_steps[:, 3] = DEAD_STEPS - 1
    trainer.balance.routers[1].load.counted[:] = torch.tensor([5, 5, 5, 0, 5, 5, 5, 5])
    with caplog.at_level(logging.WARNING):
        metrics = trainer.balance.end_step(updated=True)
    assert metrics["experts/dead"] >= 1 and metrics["alarm/dead_experts"] == 1
    assert "got no token for 20 steps" in caplog.text


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


@pytest.mark.slow
def test_a_run_writes_the_load_of_each_expert_and_resumes_with_it(tmp_path):
    settings = dict(model="qwen3_moe:micro", train=TrainConfig(router_auxiliary=0.01))
    config = text_run(tmp_path, "whole", checkpoint=CheckpointConfig(every=2, asynchronous=False), **settings)
    whole = pretrain(config)
    metrics = read_metrics(whole / "metrics.jsonl")
    assert all(m["experts/load_max"] >= m["experts/load_mean"] >= 1 for m in metrics)
    assert "Expert load" in (whole / "report.html").read_text()
    loads = [json.loads(line) for line in (whole / "expert_load.jsonl").read_text().splitlines()]
    assert [line["step"] for line in loads] == [1, 2, 3, 4]
    for line, m in zip(loads, metrics):
        # Two choices of each of 256 tokens in each of 4 layers of 8 experts.
        assert [(len(layer), sum(layer)) for layer in line["load"]] == [(8, 512)] * 4
        assert max(max(layer) for layer in line["load"]) / 64 == m["experts/load_max"]
    shutil.copytree(whole, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000004")
    again = pretrain(replace(config, output=str(tmp_path / "cut"), resume=True))
    assert (again / "expert_load.jsonl").read_text() == (whole / "expert_load.jsonl").read_text()
    for name in ("loss", "experts/load_max"):
        assert logged(again, name) == logged(whole, name)


def on_ranks(parallel, mode="none"):
    """Of a step that the ranks share: each layer's load, the gradients' norm, and the biases' sum."""
    world = open_world(parallel, "cpu")
    fill = partial(initialize, seed=3)
    # With as many layers as a split backward's stages.
    model = parallel_model(
        preset("qwen3_moe:micro", 128), torch.float32, world, parallel, CompileConfig(), fill, RecomputeConfig(mode)
    )
    trainer = Trainer(model, TrainConfig(warmup_steps=0, learning_rate=1e-4, **PENALTIES), 2, world)
    rows = [pack(ROWS[:1]), pack(ROWS[1:3]), pack(ROWS[3:]), pack(ROWS[1:3]).idle()]
    own = [shard_row(row, world) for row in rows[world.data_rank :: world.data_size]]
    found = []
    for _ in range(2):
        norm = trainer.step(own, LOSS)["grad_norm"]
        found.append((trainer.balance.load.tolist(), norm))
    close_world(world)
    return found


@pytest.mark.parametrize(
    ("ranks", "parallel", "mode"),
    [
        (2, ParallelConfig(pipeline=2, pipeline_schedule="zbv"), "none"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, ParallelConfig(), "none"),
                (2, ParallelConfig(tensor=2), "none"),
                (2, ParallelConfig(context=2), "full"),
                (4, ParallelConfig(expert=2, tensor=2), "selective"),
            )
        ),
    ],
)
def test_ranks_that_share_a_step_count_what_one_process_counts(ranks, parallel, mode):
    expected = on_ranks(ParallelConfig())
    for found in launch(ranks, on_ranks, parallel, mode):
        for (load, norm), (one_load, one_norm) in zip(found, expected):
            assert load == one_load
            assert norm == pytest.approx(one_norm, rel=1e-4)
