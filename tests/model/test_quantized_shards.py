"""Each rank reads its part of a quantized weight, also where that cuts blocks and heads."""

from functools import partial

import torch

from lockstep import load_model
from lockstep.config import CompileConfig, ParallelConfig
from lockstep.model import load_weights, read_config
from lockstep.model.shard import local_part
from lockstep.parallel import close_world, open_world, parallel_model
from tests.model.quantized_folders import FP8, compressed, fp8, quantize, settings_of
from tests.model.test_gguf import folder_and_file
from tests.parallel.launch import launch


def assert_parts_are_those_of_the_whole(folders):
    world = open_world(ParallelConfig(), "cpu")
    for folder in folders:
        fill = partial(load_weights, path=folder)
        model = parallel_model(read_config(folder), torch.float32, world, ParallelConfig(), CompileConfig(), fill)
        whole = dict(load_model(folder, "float32").named_parameters())
        for name, parameter in model.named_parameters():
            local, place = local_part(parameter)
            assert torch.equal(local, whole[name][place]), name
            assert local.numel() < whole[name].numel() or name.endswith(("norm.weight", "bias")), name
    close_world(world)


def test_every_rank_reads_its_part(tmp_path):
    _, file = folder_and_file(tmp_path, "llama3:micro", "Q8_0")
    quantize(tmp_path / "fp8", "deepseek_v3:micro", FP8, fp8((32, 48)), layers=2)
    four = settings_of("pack-quantized", 4, (1, 32), False)
    quantize(tmp_path / "int4", "qwen3:micro", four, compressed("pack-quantized", 4, (1, 32), False))
    # Three ranks cut the rows of heads and blocks, of which there are multiples of two.
    launch(3, assert_parts_are_those_of_the_whole, [file, tmp_path / "fp8", tmp_path / "int4"])
