"""An engine in a process of its own: what it imports, and what memory it takes."""

import subprocess
import sys

import pytest

CODE = """if True:
    import sys

    for name in ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic", "tyro"):
        sys.modules[name] = None
    import lockstep.cli, lockstep.generate, lockstep.rl
    from lockstep import Engine, EngineConfig, SamplingParams, build_model
    from lockstep.model import preset

    def resident_mib():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20

    model = build_model(preset("qwen3:tiny", 2048), dtype="float32", seed=0)
    before = resident_mib()
    engine = Engine(model, EngineConfig(cache_tokens=1 << 18))
    engine.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=10, ignore_eos=True, seed=0))
    print(engine.cache.nbytes / 2**20, resident_mib() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_engine_takes_the_part_of_its_cache_that_it_fills_and_imports_nothing_of_the_server():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    capacity, taken = map(float, found.stdout.split())
    assert capacity == 1536
    assert taken < 200
