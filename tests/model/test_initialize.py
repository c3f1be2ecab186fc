"""Fresh weights: normal, and the same on every processor."""

import hashlib
from statistics import NormalDist

import numpy as np
import pytest
import torch

from lockstep import build_model
from lockstep.model import preset
from lockstep.model.initialize import normal


def test_a_small_models_weights_are_those_of_every_processor():
    model = build_model(preset("qwen3:micro"), dtype="float32", seed=3)
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    assert digest.hexdigest() == DIGEST


DIGEST = "0760e18de1d710e2c15cefbe66fb3477b980900056f01650bf759789a9c4db0f"


def test_draws_are_normal():
    draws = normal(7, 1 << 20)
    ordered = np.sort(draws.astype(np.float64))
    distribution = NormalDist()
    expected = np.array([distribution.cdf(x) for x in ordered[:: 1 << 10]])
    # Kolmogorov and Smirnov: 1.63/√n for a chance of 1 %.
    assert np.abs(expected - np.arange(0, 1, 2.0**-10)).max() < 1.63 / 2**10
    assert abs(draws.mean()) < 4 / 2**10 and abs(draws.std() - 1) < 4 / 2**10.5


def test_draws_of_a_seed_do_not_depend_on_their_number_nor_on_anothers():
    assert np.array_equal(normal(5, 999), normal(5, 5000)[:999])
    assert abs(np.corrcoef(normal(5, 100_000), normal(6, 100_000))[0, 1]) < 0.02


def test_weights_have_the_deviations_that_they_should():
    model = build_model(preset("qwen3:micro"), dtype="float32")
    block = model.layers[0]
    assert torch.equal(block.input_layernorm.weight, torch.ones(128))
    assert abs(block.mlp.up_proj.weight.std() / 0.02 - 1) < 0.02
    assert abs(block.mlp.down_proj.weight.std() / (0.02 / 8**0.5) - 1) < 0.02


@pytest.mark.parametrize(("family", "weight"), [("gemma3", 0.0), ("olmo2", 1.0), ("nanochat", 1.0)])
def test_fresh_norms_multiply_by_one(family, weight):
    norms = [p for name, p in build_model(preset(f"{family}:micro")).named_parameters() if "norm" in name]
    assert norms and all((norm == weight).all() for norm in norms)
