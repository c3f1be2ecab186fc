"""What a run leaves to the machine is the same on all ranks."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.config import ParallelConfig, PretrainConfig, to_toml
from lockstep.model import training_seconds
from lockstep.ops import native
from lockstep.parallel import World, close_world, open_world
from lockstep.train.settle import settle
from tests.parallel.launch import launch


def _settle(folder: str) -> tuple[str, str]:
    """On a rank whose own measurements say what no other's do."""
    own = Path(folder) / os.environ["RANK"]
    native.library()  # compiled before the cache folder is another
    os.environ["XDG_CACHE_HOME"] = str(own)
    training_seconds()
    (kept,) = (own / "lockstep").glob("dtype-*.json")
    faster, slower = ("bfloat16", "float32") if os.environ["RANK"] == "0" else ("float32", "bfloat16")
    kept.write_text(json.dumps({faster: 1.0, slower: 9.0}))
    world = open_world(ParallelConfig(), "cpu")
    settled = settle(PretrainConfig(model="qwen3:micro"), world)
    close_world(world)
    return settled.dtype, settled.arithmetic


def test_all_ranks_take_the_dtype_of_rank_0_and_one_arithmetic(tmp_path):
    first, second = launch(2, _settle, str(tmp_path))
    assert first == second and first[0] == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_keeps_the_dtype_it_began_with_whatever_is_faster_now(tmp_path, dtype, capsys):
    (tmp_path / "config.toml").write_text(to_toml(PretrainConfig(dtype=dtype)))
    resumed = PretrainConfig(model="qwen3:micro", output=str(tmp_path), resume=True)
    world = World(torch.device("cpu"))
    assert settle(resumed, world).dtype == dtype
    assert f"dtype auto: {dtype}, as the run began" in capsys.readouterr().err
    assert settle(replace(resumed, dtype="float32"), world).dtype == "float32", "what is given goes first"
