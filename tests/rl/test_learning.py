"""Every algorithm learns sums of digits on a CPU, and the same run with random rewards does not."""

from typing import get_args

import pytest

from benchmarks.algorithms import accuracies, start
from lockstep.config.algorithm import AlgorithmName

STEPS = 60
NOISE = 0.08
"""Of an accuracy over some 220 held-out sums about a half, two and a half standard deviations."""


@pytest.fixture(scope="module")
def careless(tmp_path_factory):
    """A model that gives half of the sums a wrong answer."""
    return start(tmp_path_factory.mktemp("start"), seed=0)


@pytest.fixture(scope="module")
def teacher(careless, tmp_path_factory):
    output = tmp_path_factory.mktemp("teacher") / "run"
    accuracies("grpo", careless, output, 0, False, None, steps=STEPS)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_accuracy_rises_with_the_rewards_and_not_with_a_coins(name, careless, tmp_path, request):
    changes = [{}, {}]
    if name == "distillation":
        changes = [{"teacher": str(request.getfixturevalue("teacher"))}, {"teacher": str(careless)}]
    learnt, control = (
        accuracies(name, careless, tmp_path / str(coin), 0, coin, None, steps=STEPS, **changes[coin])
        for coin in (False, True)
    )
    assert learnt[-1][1] > learnt[0][1] + 2 * NOISE, learnt
    assert control[-1][1] < control[0][1] + NOISE, control
