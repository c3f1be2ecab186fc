"""Checking one call of a kind finds what checking every call finds."""

from typing import Literal

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from tests.typechecker import check, checked_once_a_kind


@checked_once_a_kind(jaxtyping.jaxtyped)(typechecker=check)
def scaled(
    rows: Float[Tensor, "tokens dim"],
    scales: Float[Tensor, "tokens"],
    names: list[str],
    mode: Literal["once", "twice"],
    result: object,
) -> Float[Tensor, "tokens dim"] | None:
    return result.made


class Result:
    """Hides from the check of arguments what the function returns."""

    def __init__(self, made):
        self.made = made


GOOD = (torch.ones(3, 4), torch.ones(3), ["a"] * 9, "once", Result(torch.ones(3, 4)))


@pytest.mark.parametrize("names", [["a"], ["a"] * 9])  # a call that is remembered, and one that never is
@pytest.mark.parametrize(
    ("place", "bad"),
    [
        (0, torch.ones(2, 4)),
        (0, torch.ones(3, 4, dtype=torch.int64)),
        (1, torch.ones(4)),
        (1, [1.0, 1.0, 1.0]),
        (2, [1] * 9),
        (3, "thrice"),
        (4, Result(torch.ones(3, 5))),
        (4, Result(torch.ones(3, 4, dtype=torch.int64))),
        (4, Result("nothing")),
    ],
)
def test_a_wrong_call_after_right_ones_is_found(names, place, bad):
    good = [*GOOD[:2], names, *GOOD[3:]]
    for made in (torch.ones(3, 4), None, torch.ones(3, 4)):
        assert scaled(*good[:4], Result(made)) is made
    assert scaled(*good[:2], names=names, mode="twice", result=good[4]) is good[4].made
    with pytest.raises(jaxtyping.TypeCheckError):
        scaled(*(bad if index == place else value for index, value in enumerate(good)))
    assert scaled(*good) is good[4].made
