"""What a block reads from the residual stream, and adds to it, where norms are elsewhere than before each half.

Over tensor ranks, each has its share of the stream's rows between the halves of a block, and all rows within one. With
a norm before each half, that norm's operator gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from lockstep.ops.formats import FORMATS, NONE
from lockstep.ops.forms import FORMS
from lockstep.ops.norm import rms_norm


def branch_norm(
    x: Float[Tensor, "rows dim"], weight: Float[Tensor, "dim"], eps: float, offset: bool = False
) -> Float[Tensor, "rows dim"]:
    """`rms_norm` of rows that stay on their ranks."""
    if (form := FORMS.get(type(weight))) is not None:
        return form.branch_norm(x, weight, eps, offset)
    return rms_norm(x, weight, eps, offset)


def every_row(x: Float[Tensor, "rows dim"], weight: Tensor) -> Float[Tensor, "all_rows dim"]:
    """All ranks' rows, where `weight` is a weight of the block that reads them."""
    form = FORMS.get(type(weight))
    return x if form is None else form.every_row(x, weight)


def fused_linear(
    x: Float[Tensor, "rows dim"], weight: Float[Tensor, "out dim"], parts: Sequence[int], format: str = NONE
) -> Float[Tensor, "rows own_out"]:
    """The product with a weight that has the rows of several projections, `parts` each; over tensor ranks, with this
    rank's rows of each."""
    if (form := FORMS.get(type(weight))) is not None:
        return form.fused_linear(x, weight, parts, format)
    return FORMATS[format].linear(x, weight, 1)


def parts_of(x: Float[Tensor, "rows own_out"], parts: Sequence[int]) -> tuple[Float[Tensor, "rows own_part"], ...]:
    """The outputs of each of the projections in `fused_linear`: over tensor ranks, this rank's of each."""
    ranks = sum(parts) // x.shape[1]
    return tuple(part.contiguous() for part in x.split([part // ranks for part in parts], 1))
