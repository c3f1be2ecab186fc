"""Trainer and generator divide logits by the same temperature, whatever it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops.logprobs import row_factors

HIDDEN = torch.randn(24, 16, generator=torch.Generator().manual_seed(0)) * 3
HEAD = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))


def _agree(temperature):
    """Both sides' log-probabilities, as the engine and the loss compute them."""
    logits = ops.linear(HIDDEN, HEAD)
    rows = torch.full((24,), temperature, dtype=torch.float32)
    uniform = ops.uniforms(torch.arange(24), torch.arange(24))
    tokens, generator = ops.draw(logits, rows, uniform)
    trainer, _ = ops.token_log_probs(HIDDEN, HEAD, tokens, temperature)
    return torch.equal(generator, trainer)


def test_the_two_sides_agree_at_every_temperature_to_two_digits():
    assert [t for t in range(1, 300) if not _agree(t / 100)] == []


@settings(max_examples=100, deadline=None)
@given(st.floats(0.01, 10.0))
def test_the_two_sides_agree_at_any_temperature(temperature):
    assert _agree(temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.85, 1.1])
def test_the_factor_is_one_over_the_float32_of_the_temperature(temperature):
    expected = torch.tensor(1.0) / torch.tensor(temperature, dtype=torch.float32)
    assert torch.equal(ops.inverse_temperature(torch.tensor([temperature])), expected[None])
    assert torch.equal(row_factors(temperature, HIDDEN), expected.expand(24))


def test_temperature_0_is_greedy_and_counts_as_1():
    assert row_factors(0.0, HIDDEN).tolist() == [1.0] * 24 and _agree(0.0)
