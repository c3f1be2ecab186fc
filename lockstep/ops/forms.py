"""Operators for tensors that are not plain ones.

A layout that shards tensors over ranks registers here how it computes each operator on its kind of tensor, so this
package need not know about it. The lookup by type costs some 50 ns for a plain tensor; PyTorch's own
`__torch_function__` cannot be used, since DTensor switches it off.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

FORMS: dict[type, Any] = {}
"""By tensor type, an object, such as a module, that has the operators under the same names as here."""


def own_part(weight: Tensor) -> Tensor:
    """What this process computes with: a plain weight itself, or its part of a sharded one, with a gradient."""
    form = FORMS.get(type(weight))
    return weight if form is None else form.own_part(weight)
