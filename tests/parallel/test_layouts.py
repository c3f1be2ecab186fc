"""Every layout against one process: the same training, and the same bits forward."""

from dataclasses import replace
from functools import cache, partial

import pytest

from lockstep.config import ParallelConfig
from tests.parallel.launch import launch
from tests.parallel.layouts import LAYOUTS, Layout
from tests.parallel.training import assert_log_probs, train


def run_of(layout):
    return dict(
        dtype=layout.dtype, steps=layout.steps, model=layout.model, vocab=layout.vocab, tied=layout.tied,
        layers=layout.layers,
    )  # fmt: skip


@cache
def alone(chunks, **run):
    return launch(1, partial(train, **run), ParallelConfig(reduction_chunks=chunks))[0]


def assert_training_follows_one_process(layout):
    run = run_of(layout)
    traces = launch(layout.ranks, partial(train, **run), layout.parallel)
    expected = alone(layout.parallel.reduction_chunks or layout.parallel.tensor, **run)
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
    assert_training_follows_one_process(layout)


@pytest.mark.parametrize("axis", [pytest.param("context", marks=pytest.mark.slow), "expert"])
def test_gpt_oss_follows_one_process_where_its_gradients_have_no_fixed_order(axis):
    parallel = ParallelConfig(**{axis: 2})
    assert_training_follows_one_process(Layout(2, parallel, "gpt_oss:micro", steps=2, layers=2))
