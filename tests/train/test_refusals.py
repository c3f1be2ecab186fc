"""Settings that do not fit the model or the ranks are refused before data is read and weights exist."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.config import ParallelConfig, PretrainConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.model import preset
from lockstep.parallel.world import AXES, World
from lockstep.train.pretrain import pretrain
from lockstep.train.refusals import refuse_shape, refuse_step

MODEL = preset("qwen3:micro", 258)


def test_a_step_with_too_few_microbatches_for_the_pipeline_is_refused_before_data_is_read():
    parallel = ParallelConfig(pipeline=2)
    train = TrainConfig(tokens_per_microbatch=64)
    config = PretrainConfig(sequence_length=32, tokens_per_step=64, train=train, parallel=parallel)
    world = World(torch.device("cpu"), dict.fromkeys(AXES, 1) | {"pipeline": 2})
    with pytest.raises(UserError, match='a step has 1 micro-batches per rank, but pipeline_schedule "1f1b" on 2 ranks'):
        refuse_step(config, world)
    refuse_step(replace(config, tokens_per_step=128), world)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(sequence_length=MODEL.max_positions + 1), "sequence_length is .* positions; give at most"),
        (dict(train=TrainConfig(router_z=0.1)), "the model is dense"),
        (
            dict(train=TrainConfig(deterministic_layout=True), parallel=ParallelConfig(reduction_chunks=64)),
            "does not divide the .* features of this model's keys",
        ),
    ],
)
def test_what_does_not_fit_the_shape_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        refuse_shape(PretrainConfig(**settings), MODEL, World(torch.device("cpu")))


def test_a_run_is_refused_before_weights_exist(tmp_path, monkeypatch):
    def initialize(*_, **__):
        raise AssertionError("weights were created")

    monkeypatch.setattr("lockstep.train.setup.initialize", initialize)
    config = PretrainConfig(output=str(tmp_path / "run"), model="qwen3:micro", train=TrainConfig(router_auxiliary=0.1))
    with pytest.raises(UserError, match="the model is dense"):
        pretrain(config, ["a text"])
    assert not Path(config.output).exists()
