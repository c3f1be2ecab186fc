"""`grouped_linear` of operands rounded to float8: each group's product is that of `float8_linear`.

Roundings along rows, in the sum for a weight's gradient, take each group separately, so a group's gradients do not
depend on the other groups.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import native
from lockstep.ops.float8_products import Rounding, check_factors, layout_of, recipe_of
from lockstep.ops.grouped_linear import (
    check_groups,
    group_panels,
    grouped_gradients,
    grouped_linear,
    native_grouped_product,
)
from lockstep.ops.opaque import Operator
from lockstep.ops.packed_weights import unpacked


def float8_grouped_linear(
    x: Float[Tensor, "rows in"], weight: Float[Tensor, "groups out in"], starts: Int[Tensor, "groups+1"], kind: str
) -> Float[Tensor, "rows out"]:
    """Rows `starts[g]` to `starts[g + 1]` of `x`, times `weight[g].T`, as `float8_linear` of this kind computes it.

    kind: one with scales per row or block (`mxfp8_floor`, `mxfp8_rceil`). Raises ValueError for another kind, dtype or
    width, and as `grouped_linear` does.
    """
    if kind == "tensorwise":
        raise ValueError("experts have no tensorwise float8 product; use a kind with scales per row or block")
    check_factors(x, weight, kind)
    return _float8_grouped_linear(x, weight, starts, kind)


@torch.no_grad()
def _product(x: Tensor, weight: Tensor, starts: Tensor, kind: str) -> Tensor:
    recipe = recipe_of(kind)
    rows = recipe.operand(x, -1).values
    if native.usable(x) and (panels := group_panels(x, weight, layout_of(kind))) is not None:
        check_groups(x, weight, starts)
        return native_grouped_product(rows, weight, starts, panels)
    with unpacked():
        return grouped_linear(rows, recipe.operand(weight, -1).values, starts)


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, starts: Tensor, kind: str, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    recipe, grad_x, grad_weight = recipe_of(kind), None, None
    if needed[0]:
        rows, columns = recipe.gradient(grad, -1).values, recipe.weight_for_input(weight, -2).values
        grad_x = grouped_gradients(rows, x, columns, starts, needed=(True, False))[0]
    if needed[1] and recipe.rounds_weight_gradient:
        grad, x = (_by_group(rounding, t, starts) for rounding, t in ((recipe.gradient, grad), (recipe.operand, x)))
    if needed[1]:
        grad_weight = grouped_gradients(grad, x, weight, starts, needed=(False, True))[1]
    return grad_x, grad_weight


def _by_group(rounding: Rounding, x: Tensor, starts: Tensor) -> Tensor:
    """Each group's rows, rounded for a sum over them."""
    if native.is_pretending() or x.is_meta:
        return rounding(x, -2).values
    bounds = starts.tolist()
    return torch.cat([rounding(x[first:stop], -2).values for first, stop in zip(bounds, bounds[1:])])


_float8_grouped_linear = Operator(
    "float8_grouped_linear(Tensor x, Tensor weight, Tensor starts, str kind) -> Tensor",
    _product,
    fake=lambda x, weight, starts, kind: x.new_empty(x.shape[0], weight.shape[1]),
    gradients=_gradients,
    kind="linear",
)
