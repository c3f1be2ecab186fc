"""Latent attention in the engine: the trainer's bits out of a cache of keys alone, whatever the load."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model
from lockstep.config import CompileConfig
from lockstep.generate.runner import make_cache
from lockstep.model import Latent, Yarn, preset
from lockstep.parallel import apply_compile
from lockstep.rl.scoring.explain import first_difference
from tests.generate.test_engine import check_load

SHAPE = replace(
    preset("deepseek_v3:micro", 120), dim=64, num_layers=2, intermediate_size=96, max_positions=512, head_dim=64,
    latent=Latent(32, 16, 32, 24, q_rank=40), experts=None,
    rope_scaling=Yarn(4.0, 128, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
"""Of a key's 64 features 32 are the latent's: less than half of what its four heads' keys and values would take."""


@cache
def _model(dtype, compiled=False):
    model = build_model(SHAPE, dtype, seed=2)
    with torch.no_grad():  # sharper logits than fresh weights give: draws that depend on them
        model.embed_tokens.weight.mul_(8)
    if compiled:
        apply_compile(model, CompileConfig(backend="inductor"))
    return model


@pytest.mark.parametrize(
    ("dtype", "seed", "budget", "cache_tokens"),
    [("bfloat16", 2, 60, 4096), pytest.param("float32", 1, 19, 304, marks=pytest.mark.slow)],
)
def test_load_changes_no_bit_and_loses_no_page(dtype, seed, budget, cache_tokens):
    config = dict(budget=budget, sequences=5, cache_tokens=cache_tokens, prefix_cache=True)
    check_load(_model(dtype), seed, config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_load_changes_no_bit_of_a_compiled_model(dtype):
    check_load(_model(dtype, compiled=True), 3, dict(budget=60, sequences=5, cache_tokens=304, prefix_cache=True))


def test_a_prefix_that_is_found_has_the_bits_of_one_that_is_computed():
    model, prompt = _model("bfloat16"), [1, 2, 3] * 30
    engine = Engine(model, EngineConfig(max_tokens_per_step=32, max_sequences=4, cache_tokens=1024))
    params = SamplingParams(max_tokens=12, n=3, seed=4, ignore_eos=True)
    first, second = ([c.logprobs for c in engine.generate([prompt], params)[0]] for _ in range(2))
    assert first == second and engine.statistics.prompt_tokens_reused > 0


def test_the_cache_holds_one_key_per_token():
    cache = make_cache(_model("bfloat16"), num_pages=10)
    assert cache.nbytes == 2 * 10 * 16 * 64 * 2  # layers, pages, tokens of a page, features, bytes


def test_parity_explains_it_operator_by_operator():
    assert first_difference(_model("float32"), [5, 6, 7] * 12, 20) is None
