"""Number formats of a product's factors, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from lockstep.ops.float8_grouped import float8_grouped_linear
from lockstep.ops.float8_products import float8_linear
from lockstep.ops.grouped_linear import grouped_linear
from lockstep.ops.integer_grouped import integer_grouped_linear
from lockstep.ops.integer_linear import int4_linear, int8_linear, layout_of, rounded_rows, rounded_weight
from lockstep.ops.linear import linear
from lockstep.ops.packed_weights import Layout


class Format(NamedTuple):
    """A product, and the roundings of its factors."""

    linear: Callable[[Tensor, Tensor, int], Tensor]
    """The product of rows and a weight, whose K a layout cuts into chunks."""
    grouped: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The product of grouped rows and stacked weights, and where each group starts."""
    rounded_rows: Callable[[Tensor], Tensor]
    """For the gradients of a head."""
    rounded_weight: Callable[[Tensor], Tensor]
    layout: Layout | None = None
    """How a weight can be packed, if the product does not need its own numbers."""


def _integers(of_product: Callable[[Tensor, Tensor, int], Tensor], group: int) -> Format:
    grouped, of_rows, of_weight = (
        partial(f, group=group) for f in (integer_grouped_linear, rounded_rows, rounded_weight)
    )
    return Format(of_product, grouped, of_rows, of_weight, layout_of(group))


def _float8(kind: str) -> Format:
    return Format(
        lambda x, weight, chunks: float8_linear(x, weight, kind, chunks),
        lambda x, weight, starts: float8_grouped_linear(x, weight, starts, kind),
        _unrounded,
        _unrounded,
    )


def _unrounded(x: Tensor) -> Tensor:
    return x


NONE = "none"
"""The format of the tensors themselves."""
FORMATS = {
    NONE: Format(linear, grouped_linear, _unrounded, _unrounded),
    "int8": _integers(int8_linear, 0),
    "int4": _integers(partial(int4_linear, group=32), 32),
    "int4_128": _integers(partial(int4_linear, group=128), 128),
    "float8": _float8("tensorwise"),
    "float8_rowwise": _float8("rowwise"),
    "float8_rowwise_gw_hp": _float8("rowwise_high_precision_weight_gradient"),
    "mxfp8": _float8("mxfp8_rceil"),
    "mxfp8_floor": _float8("mxfp8_floor"),
}


def formatted_linear(
    x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"], format: str, chunks: int = 1
) -> Float[Tensor, "rows out"]:
    """`linear` with factors in a format, a key of `FORMATS` other than `none`."""
    return FORMATS[format].linear(x, weight, chunks)
