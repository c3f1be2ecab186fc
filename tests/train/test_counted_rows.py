"""Padding, idle micro-batches and shared prompts weigh nothing of their own in the experts' load and its penalties."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from lockstep import build_model
from lockstep.config import CompileConfig, ParallelConfig, RecomputeConfig, TrainConfig
from lockstep.data.preferences import AnswerTokens, Example
from lockstep.data.rows import Row
from lockstep.model import initialize, preset
from lockstep.ops import ExpertLoad
from lockstep.parallel import World, apply_compile, close_world, open_world, parallel_model
from lockstep.train import Trainer, pack
from lockstep.train.context import shard_row
from lockstep.train.objective import NextTokenLoss
from lockstep.train.packing import pack_rows, pack_scored
from lockstep.train.preference_batches import preference_batch
from tests.parallel.launch import launch

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


def stepped(cut, shape=SHAPE, backend="none", **settings):
    """The load of two steps, and the second's gradients, which the load of the first is in."""
    model = build_model(shape, "float32", seed=1)
    apply_compile(model, CompileConfig(backend))
    trainer = Trainer(model, TrainConfig(warmup_steps=0, learning_rate=1e-4, **settings), 10)
    loads, gradients = [], {}
    for _ in range(2):
        held = trainer.optimizer.update
        trainer.optimizer.update = lambda *a, held=held: (gradients.update(kept(trainer)), held(*a))
        trainer.step(cut, OnlyCounted(TARGETS))
        trainer.optimizer.update = held
        loads.append(trainer.balance.load.clone())
    return loads, gradients, [router.e_score_correction_bias for router in trainer.balance.routers.values()]


def kept(trainer):
    return {name: grad.to(torch.float32, copy=True) for name, grad in trainer.optimizer.gradients.pending().items()}


@pytest.mark.parametrize("cut", list(CUTS)[1:])
def test_loads_and_penalised_gradients_are_those_of_one_micro_batch(cut):
    loads, gradients, _ = stepped(CUTS["one micro-batch"], **PENALTIES)
    assert [load.sum(-1).tolist() for load in loads] == [[2 * TOKENS] * 2] * 2
    others, found, _ = stepped(CUTS[cut], **PENALTIES)
    assert all(map(torch.equal, loads, others))
    compare(found, gradients)


def compare(found, gradients):
    for name, gradient in gradients.items():  # whose sums round in another order
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("fault", ["padding counts", "idle rows count"])
def test_rows_that_count_are_found(monkeypatch, fault):
    loads, gradients, _ = stepped(CUTS["one micro-batch"], **PENALTIES)
    exact = ExpertLoad.counts_of
    monkeypatch.setattr(ExpertLoad, "counts_of", lambda self, rows: exact(self, rows).clamp(min=1))
    others, found, _ = stepped(CUTS["idle ones" if "idle" in fault else "padding within the row"], **PENALTIES)
    assert not torch.equal(loads[0], others[0])
    name = "layers.1.mlp.gate.weight"
    assert not torch.allclose(found[name], gradients[name], rtol=1e-2)


def test_choice_biases_move_by_the_load_of_tokens_alone():
    expected, *others = (stepped(CUTS[cut], BIASED, router_bias_rate=0.1)[2] for cut in ("one each", "idle ones"))
    assert all(map(torch.equal, expected, others[0])) and any(bias.any() for bias in expected)


@pytest.mark.slow
def test_compiled_layers_count_as_others_do():
    loads, gradients, _ = stepped(CUTS["one micro-batch"], **PENALTIES)
    others, found, _ = stepped(CUTS["idle ones"], backend="inductor", **PENALTIES)
    assert all(map(torch.equal, loads, others))
    compare(found, gradients)


def test_a_shared_start_counts_once_for_each_sequence_that_has_it():
    scored = [list(range(8, len(row))) for row in ROWS[:3]]
    shared, apart = (pack_scored(ROWS[:3], scored, left_out) for left_out in ([0, 7, 7], None))
    assert len(shared.tokens) < len(apart.tokens)
    assert shared.counts[:8].tolist() == [3] * 7 + [1]
    loads, gradients, _ = stepped([apart], **PENALTIES)
    others, found, _ = stepped([shared], **PENALTIES)
    assert all(map(torch.equal, loads, others)) and loads[0].sum() == 2 * 2 * sum(len(row) - 1 for row in ROWS[:3])
    compare(found, gradients)


def test_a_micro_batch_of_no_preferences_counts_for_nothing():
    answers = (AnswerTokens([*START, 1, 2], [7, 8]), AnswerTokens([*START, 3], [7]))
    world = World(torch.device("cpu"))
    assert preference_batch([], world, True).row.counts.sum() == 0
    for share in (True, False):  # what predicts nothing is left out
        assert preference_batch([Example(answers, True, 0)], world, share).row.counts.sum() == 8 + 7


def on_ranks(parallel, mode="none"):
    """Of a step that the ranks share: each layer's load, the gradients' norm, and the biases' sum."""
    world = open_world(parallel, "cpu")
    fill = partial(initialize, seed=3)
    recompute = RecomputeConfig(mode)
    # With as many layers as a split backward's stages.
    model = parallel_model(
        preset("qwen3_moe:micro", 128), torch.float32, world, parallel, CompileConfig(), fill, recompute
    )
    trainer = Trainer(model, TrainConfig(warmup_steps=0, learning_rate=1e-4, **PENALTIES), 2, world)
    rows = [pack(ROWS[:1]), pack(ROWS[1:3]), pack(ROWS[3:]), pack(ROWS[1:3]).idle()]
    own = [shard_row(row, world) for row in rows[world.data_rank :: world.data_size]]
    found = []
    for _ in range(2):
        norm = trainer.step(own, OnlyCounted(TARGETS))["grad_norm"]
        found.append((trainer.balance.load.tolist(), norm))
    close_world(world)
    return found


@pytest.fixture(scope="module")
def one_process():
    return on_ranks(ParallelConfig())


P = ParallelConfig


@pytest.mark.parametrize(
    ("ranks", "parallel", "mode"),
    [
        (2, P(), "none"),
        pytest.param(2, P(tensor=2), "none", marks=pytest.mark.slow),
        pytest.param(2, P(context=2), "full", marks=pytest.mark.slow),
        (2, P(pipeline=2, pipeline_schedule="zbv"), "none"),
        (4, P(expert=2, tensor=2), "selective"),
    ],
)
def test_ranks_that_share_a_step_count_what_one_process_counts(one_process, ranks, parallel, mode):
    for found in launch(ranks, on_ranks, parallel, mode):
        for (load, norm), (expected, one_norm) in zip(found, one_process):
            assert load == expected
            assert norm == pytest.approx(one_norm, rel=1e-4)
