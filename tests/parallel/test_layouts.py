"""Every layout against one process: the same training, and the same bits forward."""

from dataclasses import replace
from functools import cache

import pytest

from lockstep.config import ParallelConfig
from tests.faults import VARIABLE
from tests.parallel.launch import launch
from tests.parallel.layouts import LAYOUTS, Layout
from tests.parallel.training import assert_log_probs, train


@cache
def alone(chunks, *how):
    return launch(1, train, ParallelConfig(reduction_chunks=chunks), *how)[0]


def how(layout):
    settings, recompute, compiled = None, None, False
    return (
        layout.dtype,
        layout.steps,
        layout.model,
        layout.vocab,
        layout.tied,
        settings,
        recompute,
        compiled,
        layout.layers,
    )


def assert_training_follows(layout, traces):
    expected = alone(layout.parallel.reduction_chunks or layout.parallel.tensor, *how(layout))
    assert_log_probs(traces, expected, layout.parallel.tensor)
    # Gradients are added in another order. In bfloat16 a weight is rounded to 8 bits after every step, and so are the
    # parts of a gradient that tensor ranks add.
    tolerance = 1e-5 if layout.dtype == "float32" else 1e-3 if layout.parallel.tensor == 1 else 5e-3
    # Of each parameter's way: AdamW divides small gradients, and their last bits, by themselves. Half the learning rate
    # leaves half of it.
    way = 1e-2 if layout.dtype == "float32" else 0.2
    moved = set()
    for trace in traces:
        assert trace.losses == pytest.approx(expected.losses, rel=tolerance)
        assert trace.norms[0] == pytest.approx(expected.norms[0], rel=tolerance)
        if layout.dtype == "float32":
            assert trace.norms == pytest.approx(expected.norms, rel=1e-4)
        # A stage of a pipeline has its own layers' weights only.
        moved |= trace.moved.keys()
        for name, own in trace.moved.items():
            # In bfloat16 a gradient near zero may turn its sign, and its weight goes all the way back.
            allowed = way if layout.dtype == "float32" else max(way, 2 / own.numel() ** 0.5)
            assert (own - expected.moved[name]).norm() <= allowed * expected.moved[name].norm(), name
    assert moved == expected.moved.keys()


def shortened(layout):
    """The stages of a pipeline need all layers."""
    return replace(layout, steps=2, layers=2 if layout.parallel.pipeline == 1 else 4)


QUICK = [shortened(layout) for layout in LAYOUTS if layout.quick]


@pytest.mark.parametrize(
    "layout",
    [*QUICK, *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS)],
    ids=lambda layout: f"{layout.name}-{layout.dtype}-{layout.steps}",
)
def test_training_follows_one_process(layout):
    assert_training_follows(layout, launch(layout.ranks, train, layout.parallel, *how(layout)))


@pytest.mark.parametrize("axis", [pytest.param("context", marks=pytest.mark.slow), "expert"])
def test_gpt_oss_follows_one_process_where_its_gradients_have_no_fixed_order(axis):
    layout = Layout(2, ParallelConfig(**{axis: 2}), "gpt_oss:micro", steps=2, layers=2)
    assert_training_follows(layout, launch(2, train, layout.parallel, *how(layout)))


P = ParallelConfig
TENSOR, FSDP, HSDP, CONTEXT, ZBV = (
    shortened(Layout(ranks, parallel, dtype=dtype))
    for ranks, parallel, dtype in (
        (2, P(tensor=2), "bfloat16"),
        (2, P(), "float32"),
        (4, P(data_replicate=2), "float32"),
        (2, P(context=2), "float32"),
        (2, P(pipeline=2, pipeline_schedule="zbv"), "bfloat16"),
    )
)
PLANTED = [
    ("half_the_learning_rate", TENSOR),
    ("half_the_learning_rate", FSDP),
    ("stale_weight", HSDP),
    ("stale_weight", ZBV),
    ("repeated_batch", CONTEXT),
    ("repeated_batch", ZBV),
    ("swapped_shard", FSDP),
    ("swapped_shard", TENSOR),
    ("flipped_bit", HSDP),
    ("flipped_bit", ZBV),
    ("no_sum_over_data_ranks", FSDP),
    ("no_sum_over_data_ranks", CONTEXT),
    ("no_sum_over_tensor_ranks", TENSOR),
]


@pytest.mark.parametrize(
    "fault, layout",
    [
        pytest.param(*case, marks=() if index == 0 else pytest.mark.slow, id=f"{case[0]}-{case[1].name}")
        for index, case in enumerate(PLANTED)
    ],
)
def test_a_planted_fault_is_found(monkeypatch, fault, layout):
    alone(layout.parallel.tensor, *how(layout))
    monkeypatch.setenv(VARIABLE, fault)
    traces = launch(layout.ranks, train, layout.parallel, *how(layout))
    with pytest.raises(AssertionError):
        assert_training_follows(layout, traces)
