"""What fits no model or ranks is refused before weights exist; what settings leave open is the same on all ranks."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import warn_about_reduction_chunks
from lockstep.config import ParallelConfig, PretrainConfig, TrainConfig, to_toml
from lockstep.errors import UserError
from lockstep.model import build_model, load_model, preset, save_model
from lockstep.parallel import World, close_world, open_world
from lockstep.parallel.world import AXES
from lockstep.train.pretrain import pretrain
from lockstep.train.refusals import refuse_shape, refuse_step
from lockstep.train.resolve_defaults import resolve_defaults
from tests.parallel.launch import launch

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


def test_a_run_is_refused_before_its_folder_exists(tmp_path):
    config = PretrainConfig(output=str(tmp_path / "run"), model="qwen3:micro", train=TrainConfig(router_auxiliary=0.1))
    with pytest.raises(UserError, match="the model is dense"):
        pretrain(config, ["a text"])
    assert not Path(config.output).exists()


def _settle() -> tuple[str, str]:
    """On a rank whose processor has instructions that the other's lacks."""
    if os.environ["RANK"] == "1":
        os.environ["LOCKSTEP_ISA"] = "plain"
    world = open_world(ParallelConfig(), "cpu")
    resolved = resolve_defaults(PretrainConfig(model="qwen3:micro"), world)
    close_world(world)
    return resolved.dtype, resolved.arithmetic


def test_ranks_with_other_instructions_compute_in_one_arithmetic_and_its_dtype():
    assert launch(2, _settle, fresh=True) == [("float32", "portable")] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_keeps_the_dtype_it_began_with_whatever_is_faster_now(tmp_path, dtype, capsys):
    (tmp_path / "config.toml").write_text(to_toml(PretrainConfig(dtype=dtype)))
    resumed = PretrainConfig(model="qwen3:micro", output=str(tmp_path), resume=True)
    world = World(torch.device("cpu"))
    assert resolve_defaults(resumed, world).dtype == dtype
    if dtype == "float32":
        assert resolve_defaults(resumed, world).arithmetic == "portable"
    assert f"dtype auto: {dtype}, as the run began" in capsys.readouterr().err
    assert resolve_defaults(replace(resumed, dtype="float32"), world).dtype == "float32", "what is given goes first"


@pytest.mark.parametrize("given", ["setting", "folder"])
def test_a_float32_run_has_the_same_bits_on_every_processor(tmp_path, given):
    save_model(build_model(preset("qwen3:micro", 258), "float32"), tmp_path / "model")
    name, dtype = ("qwen3:micro", "float32") if given == "setting" else (str(tmp_path / "model"), "auto")
    resolved = resolve_defaults(
        PretrainConfig(model=name, dtype=dtype, output=str(tmp_path / "run")), World(torch.device("cpu"))
    )
    assert (resolved.dtype, resolved.arithmetic) == ("float32", "portable")


def test_sums_have_the_chunks_of_the_tensor_degree_or_of_the_models_own_run(tmp_path, caplog):
    shape = replace(preset("qwen3:micro", 258), reduction_chunks=4)
    save_model(build_model(shape, "float32"), tmp_path / "four")
    save_model(build_model(replace(shape, reduction_chunks=1), "float32"), tmp_path / "one")
    world = World(torch.device("cpu"))

    def chunks(model, **parallel):
        config = PretrainConfig(model=model, dtype="float32", parallel=ParallelConfig(**parallel))
        return resolve_defaults(config, world).parallel.reduction_chunks

    four, one = str(tmp_path / "four"), str(tmp_path / "one")
    assert [chunks(one), chunks(one, tensor=2), chunks(four), chunks(four, tensor=2), chunks("qwen3:micro")] == [
        1, 2, 4, 4, 1,
    ]  # fmt: skip
    assert not caplog.text
    assert chunks(four, reduction_chunks=2) == 2
    assert "was trained with reduction_chunks 4, but 2 are used here" in caplog.text
    caplog.clear()
    # Of a run's checkpoint one chunk is known as well; a folder from elsewhere was never computed here.
    (tmp_path / "one" / "state.json").write_text('{"arithmetic": "portable"}')
    warn_about_reduction_chunks(tmp_path / "one", 2)
    assert "was trained with reduction_chunks 1, but 2 are used here" in caplog.text
    # transformers reads a folder that says so, and one that was summed at once says nothing.
    assert json.loads((tmp_path / "four" / "config.json").read_text())["reduction_chunks"] == 4
    assert "reduction_chunks" not in json.loads((tmp_path / "one" / "config.json").read_text())
    assert load_model(four).config == shape
