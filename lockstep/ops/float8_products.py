"""Matrix products of operands rounded to float8, in the forward and the backward pass.

The sums are those of `linear` over the rounded operands, so with scales per row or block along K, a row's bits do not
depend on the other rows. With `tensorwise`, one scale serves all rows of `x`, so they do.

Which operand is rounded along which dimension is as in torchao 0.18 (`Float8LinearConfig.from_recipe_name` and
`MXFP8Linear`): always the dimension that a product sums over. Gradients are e4m3, with `tensorwise` e5m2.

On GPUs with instructions for float8, bfloat16 is multiplied by the tensor cores (`cuda/scaled_products.py`), whose sums
are another order, in fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from lockstep.ops import native, one_order
from lockstep.ops.cuda import scaled_products
from lockstep.ops.float8 import BLOCK, SCALINGS, block_values, row_values, scaled_values, tensor_values
from lockstep.ops.linear import (
    input_gradient,
    native_product,
    product,
    product_sums,
    token_weight_gradient,
    weight_gradient,
)
from lockstep.ops.opaque import Operator
from lockstep.ops.packed_weights import Layout, packed, unpacked


class Rounded(NamedTuple):
    values: Float[Tensor, "*groups rows in"]
    scale: Float[Tensor, ""] | None = None
    """What to multiply the values by; None for 1, if they include their scales."""


Rounding = Callable[[Tensor, int], Rounded]
"""Rounds matrices whose products will be summed over this dimension: -2 or -1."""


class Recipe(NamedTuple):
    operand: Rounding
    """Of `x` and the weight in the forward pass, `x` for the weight's gradient, the weight for the input's gradient."""
    gradient: Rounding
    """Of the output's gradient."""
    weight_for_input: Rounding
    """Of the weight for the input's gradient."""
    rounds_weight_gradient: bool = True


def _by_row(x: Tensor, dim: int) -> Rounded:
    return Rounded(row_values(x, dim))


def _by_matrix(x: Tensor, dim: int) -> Rounded:
    return Rounded(row_values(x, (-2, -1)))


def _by_blocks(scaling: str) -> Recipe:
    def rounding(x: Tensor, dim: int) -> Rounded:
        return Rounded(block_values(x, scaling, dim))

    return Recipe(rounding, rounding, rounding)


def _by_tensor(dtype: torch.dtype) -> Rounding:
    return lambda x, dim: Rounded(*tensor_values(x, dtype))


_OPERAND, _GRADIENT = _by_tensor(torch.float8_e4m3fn), _by_tensor(torch.float8_e5m2)
RECIPES = {
    "tensorwise": Recipe(_OPERAND, _GRADIENT, _OPERAND),
    "rowwise": Recipe(_by_row, _by_row, _by_row),
    "rowwise_high_precision_weight_gradient": Recipe(_by_row, _by_row, _by_matrix, rounds_weight_gradient=False),
    **{f"mxfp8_{scaling}": _by_blocks(scaling) for scaling in SCALINGS},
}


def float8_linear(
    x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"], kind: str, chunks: int = 1
) -> Float[Tensor, "rows out"]:
    """`linear` of operands rounded to float8, float32 or bfloat16 like `x`; its gradients, of rounded operands as well.

    kind: `tensorwise`: one scale per tensor. `rowwise`: a power of two per row of each operand of each product.
    `rowwise_high_precision_weight_gradient`: as rowwise, but the weight's gradient is that of `linear`, and the weight
    has one scale in the product for the input's gradient. `mxfp8_floor`, `mxfp8_rceil`: a power of two per block of 32
    numbers along the dimension that a product sums over, as in `block_values`; torchao's training configurations use
    rceil. In the gradients' products, the last block of rows or outputs may be shorter. chunks: as in `linear`.

    A row of `x` with an infinity or NaN is NaN in the output, with `tensorwise` all rows are; the same holds for the
    weight's rows and the output's columns. Raises ValueError for another kind, dtype or width, which MX needs in blocks
    of 32.
    """
    check_factors(x, weight, kind)
    return _float8_linear(x, weight, kind, chunks)


def rounded_weight(weight: Float[Tensor, "*groups out in"], kind: str) -> Rounded:
    """The weight as `rounded_product` reads it. `kind`: of `float8_linear`."""
    return recipe_of(kind).operand(weight, -1)


@torch.no_grad()
def rounded_product(
    x: Float[Tensor, "rows in"], weight: Rounded, kind: str, chunks: int = 1
) -> Float[Tensor, "rows out"]:
    """`float8_linear` without gradient, with a weight that was rounded before. Never by a GPU's tensor cores."""
    left = recipe_of(kind).operand(x, -1)
    if left.scale is None:
        return product(left.values, weight.values, chunks)
    return _scaled(product_sums(left.values, weight.values, chunks), left, weight, x.dtype)


@torch.no_grad()
def float8_sums(
    x: Float[Tensor, "rows in"],
    weight: Float[Tensor, "outputs in"],
    kind: str,
    chunks: int,
    of_rows: Float32[Tensor, "rows"] | None = None,
    of_outputs: Float32[Tensor, "outputs"] | None = None,
) -> Float32[Tensor, "rows outputs"]:
    """The sums of `float8_linear` before they are rounded, for ranks that each have a part of K; not for `tensorwise`.

    The scales are those of the whole rows of `x` and of the weight, None for blocks.
    """
    check_factors(x, weight, kind)
    left, layout = _operand(x, kind, of_rows), layout_of(kind)
    packable = native.usable(x) and not native.is_pretending()
    if packable and (panels := packed(weight, x.shape[0], layout, of_outputs)) is not None:
        return native_product(left, weight, panels, chunks, torch.float32)
    with unpacked():
        return product_sums(left, _operand(weight, kind, of_outputs), chunks)


def recipe_of(kind: str) -> Recipe:
    if kind not in RECIPES:
        raise ValueError(f'the kind of a float8 product is "{kind}"; it can be {", ".join(RECIPES)}')
    return RECIPES[kind]


def check_factors(x: Tensor, weight: Tensor, kind: str) -> None:
    recipe_of(kind)
    if x.dtype not in (torch.float32, torch.bfloat16) or x.dtype != weight.dtype or x.shape[1] != weight.shape[-1]:
        raise ValueError(
            f"a float8 product needs factors of one width, both float32 or both bfloat16, but has {list(x.shape)} "
            f"{x.dtype} and {list(weight.shape)} {weight.dtype}"
        )
    if kind.startswith("mxfp8") and x.shape[1] % BLOCK:
        raise ValueError(
            f"an mxfp8 product needs input features in blocks of {BLOCK}, but has {x.shape[1]}; keep this layer in "
            f"bfloat16 or use rowwise float8, which takes any number"
        )


@cache
def layout_of(kind: str) -> Layout:
    """How weights are packed."""
    return Layout(rounded=lambda weight, scales: _operand(weight, kind, scales))


def _operand(x: Tensor, kind: str, scales: Tensor | None = None) -> Tensor:
    """The values of an operand, with the scales of its rows if they are given, for kinds whose values include them."""
    return recipe_of(kind).operand(x, -1).values if scales is None else scaled_values(x, scales[:, None])


def _product(x: Tensor, weight: Tensor, kind: str, chunks: int) -> Tensor:
    if scaled_products.usable(x, weight, kind, chunks):
        return scaled_products.product(x, weight, kind)
    packable = kind != "tensorwise" and native.usable(x) and not native.is_pretending()
    if packable and (panels := packed(weight, x.shape[0], layout_of(kind))) is not None:
        return native_product(_operand(x, kind), weight, panels, chunks, x.dtype)
    with unpacked():
        return rounded_product(x, rounded_weight(weight, kind), kind, chunks)


def _scaled(sums: Tensor, left: Rounded, right: Rounded, dtype: torch.dtype) -> Tensor:
    assert left.scale is not None and right.scale is not None
    return sums.mul_(left.scale * right.scale).to(dtype)


def float8_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, kind: str, chunks: int, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """Of `float8_linear`'s factors."""
    recipe = recipe_of(kind)
    one_process = one_order.shared_tokens() is None and one_order.gradient_chunks() == 1
    if one_process and scaled_products.usable(x, weight, kind, chunks):
        grad_x = scaled_products.input_gradient(grad, weight, kind) if needed[0] else None
        if not needed[1] or not recipe.rounds_weight_gradient:
            return grad_x, token_weight_gradient(grad, x) if needed[1] else None
        return grad_x, scaled_products.weight_gradient(grad, x, kind)
    grad_x = _input_gradient(grad, weight, recipe, chunks) if needed[0] else None
    return grad_x, _token_weight_gradient(grad, x, recipe) if needed[1] else None


def _input_gradient(grad: Tensor, weight: Tensor, recipe: Recipe, chunks: int) -> Tensor:
    parts = one_order.gradient_chunks() if chunks == 1 and grad.shape[1] > 1 else 1
    left, right = recipe.gradient(grad, -1), recipe.weight_for_input(weight, -2)
    if left.scale is None:
        return input_gradient(left.values, right.values, parts)
    return _scaled(_gradient_sums(left.values, right.values.T, parts), left, right, grad.dtype)


def _token_weight_gradient(grad: Tensor, x: Tensor, recipe: Recipe) -> Tensor:
    """With one order, the rows are those of all ranks before they are rounded, since scales depend on all of them."""
    if not recipe.rounds_weight_gradient:
        return token_weight_gradient(grad, x)
    if (shared := one_order.shared_tokens()) is None:
        return _weight_gradient(recipe.gradient(grad, -2), recipe.operand(x, -2), grad.dtype)
    part, whole = shared.part(grad.shape[1]), grad.new_zeros(grad.shape[1], x.shape[1])
    left, right = recipe.gradient(shared.gather(grad), -2), recipe.operand(shared.gather(x), -2)
    whole[part] = _weight_gradient(left._replace(values=left.values[:, part]), right, grad.dtype)
    return whole


def _weight_gradient(grad: Rounded, x: Rounded, dtype: torch.dtype) -> Tensor:
    if grad.scale is None:
        return weight_gradient(grad.values, x.values)
    return _scaled(_gradient_sums(grad.values.T, x.values.T), grad, x, dtype)


def _gradient_sums(left: Tensor, right: Tensor, chunks: int = 1) -> Tensor:
    """In float32, also where a library computes other gradients: it would round them before they are scaled."""
    return product_sums(left, right, chunks) if native.usable(left) else left.float() @ right.float().T


_float8_linear = Operator(
    "float8_linear(Tensor x, Tensor weight, str kind, int chunks) -> Tensor",
    _product,
    fake=lambda x, weight, kind, chunks: x.new_empty(x.shape[0], weight.shape[0]),
    gradients=float8_gradients,
    kind="linear",
)
