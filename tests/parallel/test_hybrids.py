"""Models with linear attention in every layout against one process: the same bits forward, the same training."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from lockstep.config import ParallelConfig, RecomputeConfig
from lockstep.errors import UserError
from lockstep.model import ExpertsConfig
from lockstep.model.config import DeltaNet
from lockstep.ops import Routing
from lockstep.parallel import close_world, open_world
from lockstep.parallel.refusals import refuse_impossible
from lockstep.train.refusals import layout_problems
from tests.parallel import training
from tests.parallel.hybrids import FUSED, HYBRID, LENGTHS, TOKENS
from tests.parallel.launch import launch
from tests.parallel.training import assert_log_probs, assert_same_bits

P = ParallelConfig
SHAPES = {
    "hybrid": HYBRID,
    "fused": FUSED,
    "mixture": replace(HYBRID, experts=ExpertsConfig(8, 48, Routing(2))),
}
ONE_ORDER = {"deterministic_layout": True, "max_grad_norm": 0.3, "learning_rate": 3e-3}


def train(parallel, shape="hybrid", dtype="float32", settings=None, recompute=None):
    layers = 4 if parallel.pipeline > 1 else 2
    return training.train(
        parallel, dtype, steps=2, model=SHAPES[shape], settings=settings, recompute=recompute, layers=layers,
        lengths=LENGTHS, tokens=TOKENS,
    )  # fmt: skip


def _alone(parallel, layers, settings, **run):
    return training.train(
        parallel, steps=2, layers=layers, settings=dict(settings), lengths=LENGTHS, tokens=TOKENS, **run
    )


@cache
def alone(chunks, layers, shape, dtype, settings=()):
    run = partial(_alone, layers=layers, settings=settings, model=SHAPES[shape], dtype=dtype)
    return launch(1, run, P(reduction_chunks=chunks))[0]


def check(ranks, parallel, shape="hybrid", dtype="float32", recompute=None):
    traces = launch(ranks, partial(train, shape=shape, dtype=dtype, recompute=recompute), parallel)
    expected = alone(parallel.tensor, 4 if parallel.pipeline > 1 else 2, shape, dtype)
    assert_log_probs(traces, expected, parallel.tensor)
    # Gradients are added in another order, in bfloat16 rounded on the way.
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    moved = set()
    for trace in traces:
        assert trace.losses == pytest.approx(expected.losses, rel=tolerance)
        assert trace.norms[0] == pytest.approx(expected.norms[0], rel=tolerance)
        moved |= trace.moved.keys()
        for name, way in trace.moved.items():
            # AdamW divides small gradients, and their last bits, by themselves.
            assert (way - expected.moved[name]).norm() <= (
                (1e-2 if dtype == "float32" else 0.4) * expected.moved[name].norm()
            ), name
    assert moved == expected.moved.keys()


CASES = {
    "TP 2": (2, P(tensor=2)),
    "CP 2": (2, P(context=2)),
    "full DTensor: CP 2 x TP 2": (4, P(context=2, tensor=2, full_dtensor=True)),
    "TP 2 x PP 2, ZBV": (4, P(tensor=2, pipeline=2, pipeline_schedule="zbv")),
}
MORE = {
    "TP 4": (4, P(tensor=4)),
    # The third rank has no key head.
    "CP 3": (3, P(context=3)),
    "FSDP 2": (2, P()),
    "HSDP 2 x 2": (4, P(data_replicate=2)),
    "FSDP 2 x TP 2": (4, P(tensor=2)),
    "CP 2 x TP 2": (4, P(context=2, tensor=2)),
    "PP 2, 1F1B": (2, P(pipeline=2)),
    "PP 2 x CP 2, DualPipeV": (4, P(pipeline=2, context=2, pipeline_schedule="dualpipev")),
}


@pytest.mark.parametrize("layout", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_training_follows_one_process(layout):
    check(*(CASES | MORE)[layout])


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("CP 3", "hybrid"),
        pytest.param("TP 2", "fused", marks=pytest.mark.slow),
        pytest.param("FSDP 2 x TP 2", "hybrid", marks=pytest.mark.slow),
        pytest.param("full DTensor: CP 2 x TP 2", "fused", marks=pytest.mark.slow),
    ],
)
def test_training_in_bfloat16_follows_one_process(layout, shape):
    check(*(CASES | MORE)[layout], shape, "bfloat16")


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(4, P(tensor=2, expert=2)), pytest.param(2, P(context=2, expert=2), marks=pytest.mark.slow)],
)
def test_training_with_experts_on_other_ranks_follows_one_process(ranks, parallel):
    check(ranks, parallel, "mixture")


@pytest.mark.parametrize(
    ("ranks", "parallel", "shape"),
    [
        (3, P(context=3), "hybrid"),
        (4, P(context=2, tensor=2), "fused"),
        pytest.param(2, P(context=2), "hybrid", marks=pytest.mark.slow),
        pytest.param(4, P(data_replicate=2), "hybrid", marks=pytest.mark.slow),
        pytest.param(2, P(pipeline=2, pipeline_schedule="zbv"), "hybrid", marks=pytest.mark.slow),
        pytest.param(2, P(tensor=2), "fused", marks=pytest.mark.slow),
        pytest.param(4, P(context=2, tensor=2, full_dtensor=True), "fused", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_steps_in_one_order_have_the_bits_of_one_process(ranks, parallel, shape, dtype):
    chunks = 2
    layers = 4 if parallel.pipeline > 1 else 2
    expected = alone(chunks, layers, shape, dtype, tuple(ONE_ORDER.items()))
    run = partial(train, shape=shape, dtype=dtype, settings=ONE_ORDER)
    traces = launch(ranks, run, replace(parallel, reduction_chunks=chunks))
    assert_same_bits(traces, expected)
    assert_log_probs(traces, expected, parallel.tensor)


def recomputed(modes):
    """Each mode's losses and weights after two steps."""
    return [train(P(), recompute=mode) for mode in modes]


def test_recomputed_layers_give_the_very_bits_of_kept_ones():
    modes = [RecomputeConfig(mode) for mode in ("none", "full", "selective", "offload")]
    modes.append(RecomputeConfig("budget", budget_gib=2**-10))
    (((expected, *others)),) = launch(1, recomputed, modes)
    for trace in others:
        assert trace.losses == expected.losses and trace.norms == expected.norms
        assert all(torch.equal(way, expected.moved[name]) for name, way in trace.moved.items())


def test_degrees_that_do_not_divide_the_key_heads_are_refused_by_name():
    shape = replace(HYBRID, delta=DeltaNet(2, 8, 16, 32), reduction_chunks=4)
    message = "parallel.tensor 4 does not divide 2 key heads of linear attention; set it to 1 or 2"
    with pytest.raises(UserError, match=message):
        refuse_impossible(shape, {"tensor": 4}, P(tensor=4))
    refuse_impossible(shape, {"tensor": 2}, P(tensor=2))
    with pytest.raises(UserError, match=r"twice of which divides features of linear attention's heads \(24\)"):
        replace(HYBRID, delta=DeltaNet(2, 4, 16, 6), reduction_chunks=8)


def one_order_problems():
    world = open_world(P(tensor=2), "cpu")
    found = [list(layout_problems(replace(shape, reduction_chunks=2), world, P())) for shape in (HYBRID, FUSED)]
    few = replace(HYBRID, delta=DeltaNet(2, 2, 16, 32), reduction_chunks=2)
    found.append(list(layout_problems(few, world, P())))
    close_world(world)
    return found


def test_what_one_order_cannot_have_is_refused_by_name():
    (whole, by_head, few), _ = launch(2, one_order_problems)
    assert len(whole) == 1 and "one projection (in_proj_qkv)" in whole[0] and "use parallel.context" in whole[0]
    assert not by_head
    assert "does not divide the 2 value heads of linear attention; lower parallel.reduction_chunks" in few[0]
