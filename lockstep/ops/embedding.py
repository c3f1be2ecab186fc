"""The row of a table for each token."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops.forms import FORMS


def embedding(tokens: Int[Tensor, "tokens"], weight: Float[Tensor, "vocab dim"]) -> Float[Tensor, "tokens dim"]:
    """`weight[tokens]`."""
    if (form := FORMS.get(type(weight))) is not None:
        return form.embedding(tokens, weight)
    return F.embedding(tokens, weight)
