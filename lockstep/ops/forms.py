"""Operators for tensors that are more than plain ones.

A layout that cuts tensors over ranks registers here how it computes each operator on its kind of tensor, so this
package need not know of it. One look-up by type costs a plain tensor some 50 ns; PyTorch's own `__torch_function__`
is closed to this, for DTensor switches it off.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

FORMS: dict[type, Any] = {}
"""By a tensor's type: an object, such as a module, that has the operators under the names they have here."""


def own_part(weight: Tensor) -> Tensor:
    """What this process computes with: a plain weight itself, of one that is cut its part, with a gradient."""
    form = FORMS.get(type(weight))
    return weight if form is None else form.own_part(weight)
