"""Root-mean-square normalization of queries or keys over all heads together, as OLMo 2 and OLMoE have it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lockstep.ops.forms import FORMS
from lockstep.ops.norm import rms_norm


def heads_norm(
    x: Float[Tensor, "tokens heads head_dim"], weight: Float[Tensor, "dim"], eps: float, offset: bool = False
) -> Float[Tensor, "tokens heads head_dim"]:
    """`rms_norm` of each token's features of all heads, `heads · head_dim` (arXiv 2501.00656, section 2.1).

    Over tensor ranks, `x` has this rank's heads of the weight's, and so has the result.
    """
    if (form := FORMS.get(type(weight))) is not None:
        return form.heads_norm(x, weight, eps, offset)
    return rms_norm(x.flatten(1), weight, eps, offset).view_as(x)
