"""Latent attention under every kind of layout: the same training as in one process, and the same bits forward."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from lockstep.config import ParallelConfig, RecomputeConfig
from lockstep.model import Latent, preset
from tests.parallel.launch import launch
from tests.parallel.layouts import Layout
from tests.parallel.test_layouts import assert_training_follows
from tests.parallel.training import train

VOCAB = 259
SHAPE = replace(
    preset("deepseek_v3:micro", VOCAB), dim=64, num_layers=2, intermediate_size=96, head_dim=48,
    latent=Latent(32, 16, 16, 24, q_rank=40), experts=None,
)  # fmt: skip

P = ParallelConfig
LAYOUTS = [
    Layout(2, P(), layers=2),
    Layout(2, P(tensor=2), layers=2),
    Layout(2, P(tensor=2), dtype="bfloat16", layers=2),
    Layout(2, P(context=2), layers=2),
    Layout(2, P(pipeline=2), layers=2),
    Layout(2, P(pipeline=2, pipeline_schedule="zbv")),
    Layout(4, P(context=2, tensor=2), layers=2),
    Layout(4, P(context=2, tensor=2, full_dtensor=True), layers=2),
]


def _train(ranks, parallel, dtype="float32", layers=2, settings=None, recompute=None):
    return launch(ranks, train, parallel, dtype, 2, SHAPE, VOCAB, False, settings, recompute, False, layers)


@cache
def _alone(dtype, chunks, layers):
    return _train(1, P(reduction_chunks=chunks), dtype, layers)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.dtype}")
def test_training_follows_one_process(layout):
    traces = _train(layout.ranks, layout.parallel, layout.dtype, layout.layers)
    assert_training_follows(layout, traces, _alone(layout.dtype, layout.parallel.tensor, layout.layers))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_layers_give_the_very_bits_of_kept_ones(mode):
    (own,) = _train(1, P(), recompute=RecomputeConfig(mode=mode))
    expected = _alone("float32", 1, 2)
    assert own.losses == expected.losses and own.norms == expected.norms


def test_ranks_that_share_sequences_add_up_in_the_one_order():
    settings = {"deterministic_layout": True}
    (alone,) = _train(1, P(), settings=settings)
    for rank in _train(2, P(context=2), settings=settings):
        assert rank.losses == alone.losses and rank.norms == alone.norms
        assert all(torch.equal(rank.weights[name], alone.weights[name]) for name in alone.weights)
