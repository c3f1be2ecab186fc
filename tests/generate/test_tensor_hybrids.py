"""Delta networks in the engines of a tensor group."""

from functools import partial

import pytest
import torch

from lockstep import Engine, SamplingParams, score
from lockstep.config import EngineConfig, ParallelConfig
from lockstep.model import initialize
from lockstep.parallel import close_world, generator_model, open_world
from tests.generate.engines import all_pages_are_free
from tests.parallel.hybrids import HYBRID
from tests.parallel.launch import launch


def sample_hybrid(ranks, dtype):
    """What an engine samples of prompts with common prefixes in a small cache; each rank has its heads' states."""
    parallel = ParallelConfig(tensor=ranks, reduction_chunks=2)
    world = open_world(parallel, "cpu")
    model = generator_model(HYBRID, getattr(torch, dtype), world, parallel, partial(initialize, seed=3))
    engine = Engine(model, EngineConfig(90, 6, 336, draft="none"))
    assert engine.delta_cache.sizes.value_heads == 8 // ranks
    prompts = [[*range(140), 7 * seed] * (1 + seed % 2) for seed in range(5)]
    params = SamplingParams(max_tokens=9, n=2, seed=4, ignore_eos=True)
    groups = engine.generate(prompts, params)
    for prompt, group in zip(prompts, groups):
        for completion, trainer in zip(group, score(model, [prompt + c.token_ids for c in group])):
            assert torch.equal(torch.tensor(completion.logprobs), trainer[len(prompt) - 1 :])
    assert all_pages_are_free(engine) and engine.statistics.preemptions > 0
    found = groups, engine.statistics.prompt_tokens_reused
    close_world(world)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_sample_what_one_process_samples(dtype):
    (expected,) = launch(1, sample_hybrid, 1, dtype)
    assert launch(2, sample_hybrid, 2, dtype) == [expected] * 2
    assert expected[1] > 128
