"""What counts as different between generator and trainer."""

import math

import torch

from lockstep import build_model
from lockstep.model import preset
from lockstep.rl.parity import Parity
from lockstep.rl.parity_check import check_parity


def _compared(generator, trainer):
    parity = Parity()
    parity.compare(torch.tensor(generator), torch.tensor(trainer))
    return parity


def test_what_is_not_finite_differs_by_infinity_though_both_sides_have_it():
    nan, inf = math.nan, math.inf
    assert _compared([nan, -1.0], [nan, -1.0]) == Parity(2, 1, inf)
    assert _compared([-inf, -1.0], [-inf, -1.0]) == Parity(2, 1, inf)
    assert _compared([-2.0, -1.0], [-2.0, nan]) == Parity(2, 1, inf)
    assert _compared([-2.0, -1.0], [-inf, -1.0]) == Parity(2, 1, inf)


def test_a_later_difference_does_not_hide_an_infinite_one():
    parity = _compared([math.nan], [math.nan])
    parity.compare(torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert parity == Parity(2, 2, math.inf)
    assert _compared([-1.0, -2.0], [-1.0, -2.5]) == Parity(2, 1, 0.5)


def test_a_model_of_nan_does_not_pass():
    model = build_model(preset("qwen3:micro"), dtype="float32")
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    parity, _ = check_parity(model, tokens=64)
    assert parity.tokens_different == parity.tokens_checked >= 64
    assert parity.max_delta == math.inf
