"""Grading: totals, what counts as a number, and where an error in the user's reward points."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch

import lockstep.rl as rl
from lockstep.errors import UserError
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.grading import grade


class Returns(rl.Environment):
    """Gives whatever it is made with."""

    def __init__(self, *values):
        super().__init__()
        self.values = iter(values)

    def reward(self, example, completion):
        return next(self.values)


def _grade(*values, kind=Returns):
    return grade(kind(*values), [rl.Example(f"p{i}") for i in range(len(values))], [""] * len(values))


@pytest.mark.parametrize("value", [True, np.True_, 1, np.int64(1), np.float32(1.0), 1.0])
def test_a_number_of_any_kind_becomes_a_float(value):
    (graded,) = _grade(value)
    assert graded.by_name == {"reward": 1.0} and type(graded.by_name["reward"]) is float and graded.total == 1.0


def test_the_total_weighs_the_named_rewards():
    class Weighted(Returns):
        reward_weights: ClassVar = {"format": 0.25, "length": -1.0}

    (graded,) = _grade({"correct": True, "format": 1.0, "length": 0.5}, kind=Weighted)
    assert graded.total == 1.0 + 0.25 - 0.5 and graded.by_name == {"correct": 1.0, "format": 1.0, "length": 0.5}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-math.inf, "returned -inf as 'reward'"),
        (np.float64("nan"), "returned np.float64\\(nan\\)"),
        (10**400, "returned an int of 1329 bits"),
        pytest.param(10**5000, "returned an int of 16610 bits", id="longer than Python prints"),
        (3e38, r"returned 3e\+38"),  # its difference to -3e38 is infinite in float32, in which the loss is computed
        (1 + 0j, "returned \\(1\\+0j\\)"),
        (torch.tensor(1.0), "returned tensor\\(1.\\)"),
        ({"a": 9e17, "b": 9e17}, r"rewards add up to 1\.8e\+18"),
    ],
)
def test_a_reward_that_cannot_be_trained_on_is_refused_with_its_example(value, message):
    with pytest.raises(UserError, match=f"{message}.* for example 'p1'"):
        _grade(dict.fromkeys(value, 0.0) if isinstance(value, dict) else 0.5, value)


@pytest.mark.parametrize(
    ("weights", "values", "message"),
    [
        ({"reward": math.nan}, [1.0], "rewards add up to nan for example 'p0'"),
        ({"corect": 2.0}, [{"correct": 1.0}], "'corect', .* not a reward of example 'p0'. Did you mean \"correct\""),
        ({}, [{"a": 1.0}, {"b": 1.0}], "are b for example 'p1', but a for another"),
    ],
)
def test_weights_and_names_that_give_no_total_are_refused(weights, values, message):
    class Weighted(Returns):
        reward_weights: ClassVar = weights

    with pytest.raises(UserError, match=f"Weighted.*{message}"):
        _grade(*values, kind=Weighted)


@pytest.mark.parametrize(
    ("expression", "cause"), [("json.loads('{')", "JSONDecodeError"), ("eval('1+')", "SyntaxError")]
)
def test_an_error_deep_in_a_library_is_named_with_the_users_own_line(tmp_path, expression, cause):
    (tmp_path / "task.py").write_text(
        "import json\nimport lockstep.rl as rl\nclass Task(rl.Environment):\n"
        "    def examples(self, split): return [rl.Example('p')]\n"
        f"    def reward(self, example, completion):\n        return {expression}\n"
    )
    environment = load_environment(f"{tmp_path / 'task.py'}:Task")
    with pytest.raises(UserError, match=rf"task.py:6: Task.reward failed on example 'p' \({cause}"):
        grade(environment, [rl.Example("p")], [""])
