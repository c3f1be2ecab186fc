"""Dispatch of operators by tensor type.

A layout that shards tensors over ranks registers how it computes each operator on its tensor type, so this package does
not depend on it. The lookup costs about 50 ns for a plain tensor; PyTorch's `__torch_function__` cannot be used, since
DTensor disables it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

FORMS: dict[type, Any] = {}
"""By tensor type: an object, such as a module, with operators of the same names as in this package."""


def own_part(weight: Tensor) -> Tensor:
    """This process's part of a sharded weight, with a gradient; a plain weight itself."""
    form = FORMS.get(type(weight))
    return weight if form is None else form.own_part(weight)


def own_rows(weight: Tensor, parts: Sequence[int]) -> Tensor:
    """This process's rows of each of the consecutive `parts` of a weight that every process has all of, with a
    gradient; a plain weight itself."""
    form = FORMS.get(type(weight))
    return weight if form is None else form.own_rows(weight, parts)
