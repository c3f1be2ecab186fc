"""Memory of a cache is taken as it is used."""

import subprocess
import sys

import pytest
import torch

from lockstep.ops.on_demand import zeros_on_demand

CODE = """if True:
    from lockstep import Engine, EngineConfig, SamplingParams, build_model
    from lockstep.model import preset

    def resident_mib():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20

    model = build_model(preset("qwen3:tiny", 2048), dtype="float32", seed=0)
    before = resident_mib()
    engine = Engine(model, EngineConfig(cache_tokens=1 << 18))
    engine.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=40, ignore_eos=True, seed=0))
    print(engine.cache.nbytes / 2**20, resident_mib() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_engine_takes_the_part_of_its_cache_that_it_fills():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    capacity, taken = map(float, found.stdout.split())
    assert capacity == 1536
    assert taken < 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_it_is_zero_where_nothing_was_written_and_keeps_what_was(dtype):
    tensor = zeros_on_demand((3, 5, 7), dtype, "cpu")
    assert tensor.dtype == dtype and tensor.shape == (3, 5, 7) and tensor.is_contiguous()
    tensor[1] += 2
    assert tensor.sum() == 2 * 35 and (tensor[::2] == 0).all()


def test_other_devices_and_nothing_at_all():
    assert zeros_on_demand((2, 3), torch.float32, "meta").is_meta
    assert zeros_on_demand((2, 0), torch.float32, "cpu").shape == (2, 0)
