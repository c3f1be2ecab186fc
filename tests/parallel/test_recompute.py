"""Recomputed layers: the very bits of kept ones, and only the layers and operators that were asked for."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from lockstep import ops
from lockstep.config import CompileConfig, ParallelConfig, RecomputeConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.model import initialize, preset
from lockstep.ops import native
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.parallel.recompute import Budget, saved_bytes
from lockstep.train import Trainer, pack
from lockstep.train.objective import NextTokenLoss
from tests.parallel.launch import launch
from tests.parallel.training import whole

ROW = pack([list(range(1, 41)), list(range(60, 90)), [7, 7]])
NONE = RecomputeConfig()
MODES = {
    "full": RecomputeConfig("full"),
    "every second": RecomputeConfig("every", every=2),
    "all but attention": RecomputeConfig("selective"),
    "all but every operator": RecomputeConfig("selective", keep=("attention", "linear", "norm", "activation")),
    "within a budget": RecomputeConfig("budget", budget_gib=2**-10),
    "offloaded": RecomputeConfig("offload"),
}
FEW = [NONE, MODES["full"], MODES["all but attention"]]


def _model(recompute, dtype, world, compiled=False, layers=4):
    compiling = CompileConfig(backend="inductor" if compiled else "none")
    shape = replace(preset("qwen3:micro", 258), num_layers=layers)
    return parallel_model(shape, dtype, world, ParallelConfig(), compiling, partial(initialize, seed=1), recompute)


def train(modes, dtype, compiled=False):
    """Two steps in each mode on this rank: every mode's losses and last weights."""
    world = open_world(ParallelConfig(), "cpu")
    results = []
    for mode in modes:
        model = _model(mode, dtype, world, compiled, layers=2)
        trainer = Trainer(model, TrainConfig(warmup_steps=0), 2, world)
        losses = [trainer.step([ROW], NextTokenLoss(2 * 69))["loss"] for _ in range(2)]
        results.append((losses, {name: whole(p.detach()) for name, p in model.named_parameters()}))
    close_world(world)
    return results


def _assert_equal_bits(results):
    (losses, weights), *others = results
    assert losses[0] != losses[1]
    for other_losses, other_weights in others:
        assert other_losses == losses
        for name, weight in weights.items():
            assert torch.equal(weight, other_weights[name]), name


def test_recomputed_layers_give_the_very_bits_of_kept_ones():
    _assert_equal_bits(train([NONE, *MODES.values()], torch.float32))


def test_recomputed_layers_give_the_very_bits_under_fsdp():
    for results in launch(2, train, FEW, torch.bfloat16):
        _assert_equal_bits(results)


@pytest.mark.slow
def test_compiled_layers_train_under_fsdp_and_recomputed_as_in_one_process():
    ((expected, _),) = launch(1, train, [NONE], torch.float32, True, seconds=300)[0]
    for results in launch(2, train, FEW, torch.float32, True, seconds=300):
        _assert_equal_bits(results)
        # Both ranks have the very same row, so their losses add up to twice that of one process.
        assert results[0][0][0] == pytest.approx(2 * expected[0], rel=1e-6)


class _CountedAttention(ops.PackedAttention):
    forwards = 0

    def forward(self, *arguments):
        self.forwards += 1
        return super().forward(*arguments)


def _counts(recompute):
    """Forward passes of attention and matrix products that a forward and a backward of four layers make."""
    model = _model(recompute, torch.float32, open_world(ParallelConfig(), "cpu"))
    attention = _CountedAttention(ROW.lengths)
    with patch.object(native, "call", wraps=native.call) as calls:
        model(ROW.tokens, ROW.positions, attention).sum().backward()
    return attention.forwards, sum(call.args[0] == "product" for call in calls.call_args_list)


def test_only_what_was_asked_for_is_computed_again():
    attentions, products = _counts(NONE)
    assert attentions == 4 and products == 4 * 7 * 3
    assert _counts(MODES["full"]) == (8, products + 4 * 7)
    assert _counts(MODES["every second"]) == (6, products + 2 * 7)
    assert _counts(MODES["all but attention"]) == (4, products + 4 * 7)
    assert _counts(MODES["all but every operator"]) == (4, products)


def test_a_budget_keeps_what_takes_the_most_time_for_its_bytes():
    world = open_world(ParallelConfig(), "cpu")
    model = _model(NONE, torch.float32, world)
    hidden = torch.randn(72, 128, requires_grad=True)
    tables = torch.ones(72, 16), torch.zeros(72, 16)
    attend = partial(ops.PackedAttention([72]), 0)
    layer = saved_bytes(model.layers[0].forward, model.layers[0], (hidden, *tables, attend, model.halves))
    # Both normed inputs, queries before and after the norm, attention's output and the residual; keys twice and values;
    # gate, up and their product; log-sums of 4 heads; scales of 2 norms, 4 queries and 2 keys.
    assert layer == 4 * 72 * (6 * 128 + 3 * 64 + 3 * 384 + 4 + 8)
    attended, products = 4 * 72 * (128 + 4), 4 * 72 * (4 * 128 + 2 * 64 + 2 * 384 - 128)
    for level, kept in ((0, 0), (0, 3), (1, 0), (1, 1), (2, 0), (2, 3), (3, 0)):
        # All layers have this level's activations, and `kept` of them the next one's.
        levels = [0, attended, attended + products, layer]
        more = (kept + 0.5) * (levels[min(level + 1, 3)] - levels[level])
        budget = 4 * (hidden.nbytes + levels[level]) + more
        found = _counts(RecomputeConfig("budget", budget_gib=budget / 2**30))
        at_least = [4 if level > i else kept if level == i else 0 for i in range(3)]
        # The first layer is measured once per level.
        assert found == (4 + 4 - at_least[0] + 3, 4 * 7 * 3 + 7 * (4 - at_least[1] + 3)), (level, kept)
    with pytest.raises(UserError, match="does not fit the inputs of 4 layers.* give at least"):
        _counts(RecomputeConfig("budget", budget_gib=3 * hidden.nbytes / 2**30))


def test_a_budget_is_for_all_micro_batches_that_a_rank_of_a_pipeline_keeps():
    hidden, block = torch.zeros(8, 16), torch.nn.Identity()
    held = [1]
    budget = Budget(4 * hidden.nbytes + 12_000, 4, lambda: held[0])
    budget.bytes_per_row = [1000 / 8, 2000 / 8, 3000 / 8]

    def levels():
        return [budget.level(place, block.forward, block, (hidden,)) for place in range(4)]

    assert levels() == [3, 3, 3, 3]
    held[0] = 2
    # Half of it for each: the inputs of all layers, and 4,976 bytes more.
    assert levels() == [1, 1, 1, 1]
    held[0] = 9
    with pytest.raises(UserError, match="inputs of 4 layers, for 9 micro-batches at once.* give at least 1.72e-05"):
        levels()


def _passes_in_flight():
    """Of a step of four micro-batches, as this rank's budget learns it, in two schedules."""
    found = []
    world = open_world(ParallelConfig(pipeline=2), "cpu")
    for schedule in ("1f1b", "gpipe"):
        parallel = ParallelConfig(pipeline=2, pipeline_schedule=schedule)
        recompute, fill = RecomputeConfig("budget", budget_gib=1.0), partial(initialize, seed=1)
        shape = replace(preset("qwen3:micro", 258), num_layers=2)
        model = parallel_model(shape, torch.float32, world, parallel, CompileConfig(), fill, recompute)
        seen = set()
        note = lambda self, *_, seen=seen: seen.add(self.passes_in_flight()) or 0  # noqa: E731
        with patch.object(Budget, "level", note):
            model.accumulate([ROW] * 4, NextTokenLoss(4 * 69))
        found.append(seen)
    close_world(world)
    return found


def test_a_pipelines_schedule_says_how_many_micro_batches_are_kept():
    assert launch(2, _passes_in_flight) == [[{2}, {4}], [{1}, {4}]]
