"""Pipelines against one process: every schedule, tied and untied, and what cannot run is refused by name."""

from functools import partial

import pytest
import torch

from lockstep.config import ParallelConfig, RecomputeConfig
from lockstep.parallel.pipeline_schedule import alternating, bubble_fraction, split_layers
from tests.parallel.launch import launch
from tests.parallel.training import train


@pytest.mark.parametrize(
    "schedule, mode", [("zbv", "selective"), pytest.param("dualpipev", "full", marks=pytest.mark.slow)]
)
def test_a_split_backward_recomputes_activations(schedule, mode):
    layout = ParallelConfig(pipeline=2, pipeline_schedule=schedule)
    (expected,) = launch(1, partial(train, steps=2), ParallelConfig())
    _compare(launch(2, partial(train, steps=2, recompute=RecomputeConfig(mode=mode)), layout), expected)


@pytest.mark.parametrize("ranks, schedule", [(2, "zbv"), pytest.param(4, "1f1b", marks=pytest.mark.slow)])
def test_a_stage_whose_parameters_are_all_frozen_passes_gradients_on(ranks, schedule):
    rules = {"rules": ("embed_tokens.* frozen=true", "layers.0.* frozen=true", "layers.1.* frozen=true")}
    run = partial(train, steps=3, settings=rules)
    # Clipping, on the ranks that have gradients and on those that have none, is part of it.
    (expected,) = launch(1, run, ParallelConfig())
    assert expected.norms[0] > 1.0
    for trace in launch(ranks, run, ParallelConfig(pipeline=2, pipeline_schedule=schedule)):
        assert trace.losses == pytest.approx(expected.losses, rel=1e-5)
        assert trace.norms == pytest.approx(expected.norms, rel=1e-4)
        for name, weight in trace.weights.items():
            assert (weight - expected.weights[name]).norm() <= 1e-4 * expected.weights[name].norm(), name


def _compare(traces, expected, tolerance=1e-5):
    assert torch.equal(torch.cat([trace.log_probs for trace in traces]), expected.log_probs)
    weights = {}
    for trace in traces:
        # Micro-batches' gradients are added in another order, and those of a tied weight apart.
        assert trace.losses == pytest.approx(expected.losses, rel=tolerance)
        # Every rank knows the norm over all stages, a tied weight counted once.
        assert trace.norms == pytest.approx(expected.norms, rel=10 * tolerance)
        assert not weights.keys() & trace.weights.keys() or trace.weights.keys() <= weights.keys()
        weights |= trace.weights
    assert weights.keys() == expected.weights.keys()
    for name, weight in weights.items():
        # Many steps on, what sums of another order and AdamW's division by small moments leave.
        difference = (weight - expected.weights[name]).float().norm() / expected.weights[name].float().norm()
        assert difference < 10 * tolerance, name


@pytest.mark.parametrize(
    "layers, stages, settings, expected",
    [
        (4, 2, {}, [2, 2]),
        (5, 2, {}, [3, 2]),
        (8, 4, {"pipeline_head_layers": 2.0}, [2, 2, 3, 1]),
        (12, 3, {"pipeline_embedding_layers": 3.0, "pipeline_head_layers": 3.0}, [3, 6, 3]),
        (3, 3, {"pipeline_head_layers": 9.0}, [1, 1, 1]),
        (6, 3, {"pipeline_split": "layers.1, layers.5"}, [1, 4, 1]),
    ],
)
def test_layers_are_split_by_work_or_by_name(layers, stages, settings, expected):
    split = split_layers(layers, stages, ParallelConfig(**settings))
    assert [len(own) for own in split] == expected
    assert [layer for own in split for layer in own] == list(range(layers))


def test_the_bubble_is_that_of_the_papers():
    def table(name, ranks, count):
        ahead = [count if name == "gpipe" else min(count, ranks - rank) for rank in range(ranks)]
        return [alternating(rank, count, ahead[rank]) for rank in range(ranks)]

    for ranks, count in ((2, 4), (4, 8), (4, 4)):
        # (p - 1) / (m + p - 1) for p equal stages and m micro-batches (arXiv 1811.06965, 2104.04473).
        share = (ranks - 1) / (count + ranks - 1)
        assert bubble_fraction(table("gpipe", ranks, count), [1.0] * ranks) == pytest.approx(share)
        assert bubble_fraction(table("1f1b", ranks, count), [1.0] * ranks) == pytest.approx(share)
    assert bubble_fraction(table("gpipe", 2, 4), [1.0, 2.0]) > bubble_fraction(table("gpipe", 2, 4), [1.5, 1.5])
