"""Every layout against one process: the same training, and the same bits forward."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from lockstep.config import ParallelConfig
from lockstep.rl.scoring.parity_matrix import LAYOUTS as MATRIX
from tests.faults import VARIABLE
from tests.parallel.launch import launch
from tests.parallel.layouts import LAYOUTS, Layout, table
from tests.parallel.training import train


@pytest.fixture(scope="module")
def alone():
    """One process's training of a layout's model, for as many steps."""

    @cache
    def of(chunks, how):
        return launch(1, train, ParallelConfig(reduction_chunks=chunks), *how)[0]

    return lambda layout: of(layout.parallel.reduction_chunks or layout.parallel.tensor, how(layout))


def how(layout):
    rest = (None, None, False)
    return layout.dtype, layout.steps, layout.model, layout.vocab, layout.tied, *rest, layout.layers


def trained(layout):
    return launch(layout.ranks, train, layout.parallel, *how(layout))


def assert_training_follows(layout, traces, expected):
    # Sorted, for the ranks of a context group have tokens from everywhere; those of a tensor group all have the same.
    found = torch.cat([trace.log_probs for trace in traces]).sort().values
    assert torch.equal(found[:: layout.parallel.tensor], expected.log_probs.sort().values)
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
    """Of each layout in `make test`; `make test-slow` makes all steps. The stages of a pipeline need all layers."""
    return replace(layout, steps=3, layers=2 if layout.parallel.pipeline == 1 else 4)


def slow_if_met(layout):
    """Dense models whose layout is in the parity matrix, and takes few steps here."""
    met = any(layout.parallel == replace(each.parallel, reduction_chunks=0) for each in MATRIX)
    return pytest.mark.slow if met and layout.steps < 20 and "moe" not in layout.model else ()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=f"{each.name}-{each.dtype}-{each.steps}", marks=marks)
        for layout in LAYOUTS
        for each, marks in ((shortened(layout), slow_if_met(layout)), (layout, pytest.mark.slow))
    ],
)
def test_training_follows_one_process(alone, layout):
    assert_training_follows(layout, trained(layout), alone(layout))


P = ParallelConfig
FSDP, FSDP_BFLOAT16 = (shortened(Layout(2, P(), dtype=dtype)) for dtype in ("float32", "bfloat16"))
HSDP = shortened(Layout(4, P(data_replicate=2), "llama3:micro"))
CONTEXT = shortened(Layout(2, P(context=2)))
TENSOR, TENSOR_BFLOAT16 = (shortened(Layout(2, P(tensor=2), dtype=dtype)) for dtype in ("float32", "bfloat16"))
PIPELINE = shortened(Layout(2, P(pipeline=2)))
ZBV_BFLOAT16 = shortened(Layout(2, P(pipeline=2, pipeline_schedule="zbv"), dtype="bfloat16"))
EVERYWHERE = [FSDP, FSDP_BFLOAT16, HSDP, CONTEXT, TENSOR, TENSOR_BFLOAT16, PIPELINE, ZBV_BFLOAT16]
PLANTED = {
    "half_the_learning_rate": EVERYWHERE,
    "stale_weight": EVERYWHERE,
    # Of four data ranks each has one micro-batch.
    "repeated_batch": [layout for layout in EVERYWHERE if layout is not HSDP],
    "swapped_shard": EVERYWHERE,
    "flipped_bit": EVERYWHERE,
    "no_sum_over_data_ranks": [FSDP, FSDP_BFLOAT16, HSDP, CONTEXT],
    "no_sum_over_tensor_ranks": [TENSOR, TENSOR_BFLOAT16],
}
ORDINARY = [("half_the_learning_rate", TENSOR_BFLOAT16), ("no_sum_over_data_ranks", FSDP)]


@pytest.mark.parametrize(
    "fault, layout",
    [
        pytest.param(
            fault,
            layout,
            marks=() if (fault, layout) in ORDINARY else pytest.mark.slow,
            id=f"{fault}-{layout.name}-{layout.dtype}",
        )
        for fault, layouts in PLANTED.items()
        for layout in layouts
    ],
)
def test_a_planted_fault_is_found(alone, monkeypatch, fault, layout):
    expected = alone(layout)
    monkeypatch.setenv(VARIABLE, fault)
    traces = trained(layout)
    with pytest.raises(AssertionError):
        assert_training_follows(layout, traces, expected)


def test_the_documented_table_is_that_of_the_tests():
    page = Path(__file__).parents[2] / "docs" / "parallelism.md"
    assert table() in page.read_text(), f"put this into {page}:\n{table()}"
