"""Number formats of a product's factors, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from lockstep.ops import float8, float8_products, integer_linear
from lockstep.ops.float8_grouped import float8_grouped_linear
from lockstep.ops.float8_products import float8_gradients, float8_linear, float8_sums
from lockstep.ops.forms import FORMS
from lockstep.ops.grouped_linear import grouped_linear
from lockstep.ops.integer_grouped import integer_grouped_linear
from lockstep.ops.integer_linear import int4_linear, int4_sums, int8_linear, int8_sums, rounded_rows, rounded_weight
from lockstep.ops.linear import linear, product_sums
from lockstep.ops.packed_weights import Layout


class SharedScales(NamedTuple):
    """Scales that the parts of a row on several ranks have in common: the maximum of the parts' scales."""

    of_part: Callable[[Tensor], Tensor]
    """`[rows]`, of parts of rows."""
    layout: Layout
    """How a weight's part is packed with them."""


class Format(NamedTuple):
    """A product, and the roundings of its factors."""

    linear: Callable[[Tensor, Tensor, int], Tensor]
    """The product of rows and a weight, whose K a layout cuts into chunks."""
    grouped: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The product of grouped rows and stacked weights, and where each group starts."""
    sums: Callable[..., Tensor]
    """Of parts of rows and of a weight along K, and a number of chunks: sums to add to the other parts', in float32 or
    integers, which are to be scaled. With shared scales, two more arguments are those of the rows and the outputs."""
    rounded_rows: Callable[..., Tensor]
    """For the gradients of `linear`, which are those of the rounded factors; of parts of rows, with `scales`."""
    rounded_weight: Callable[..., Tensor]
    layout: Layout | None = None
    """How a weight can be packed, if the product does not need its own numbers."""
    shared: SharedScales | None = None
    """None: a part of a row has scales of its own, and the whole row the same."""
    gradients: Callable[..., tuple[Tensor | None, Tensor | None]] | None = None
    """Of `linear`, from its result's gradient, its arguments, and which are needed; None: of the rounded factors."""


def _int4(group: int) -> Format:
    functions = int4_linear, integer_grouped_linear, int4_sums, rounded_rows, rounded_weight
    product, grouped, sums, of_rows, of_weight = (partial(function, group=group) for function in functions)
    return Format(product, grouped, sums, of_rows, of_weight, integer_linear.layout_of(group))


def _int8() -> Format:
    def sums(x: Tensor, weight: Tensor, chunks: int, *scales: Tensor) -> Tensor:
        return int8_sums(x, weight, *scales)  # exact in any chunks

    grouped = partial(integer_grouped_linear, group=0)
    shared = SharedScales(integer_linear.row_scales, layout := integer_linear.layout_of(0))
    return Format(int8_linear, grouped, sums, rounded_rows, rounded_weight, layout, shared)


def _float8(kind: str) -> Format:
    def grouped(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
        return float8_grouped_linear(x, weight, starts, kind)

    def sums(x: Tensor, weight: Tensor, chunks: int, *scales: Tensor) -> Tensor:
        return float8_sums(x, weight, kind, chunks, *scales)

    def gradients(grad: Tensor, x: Tensor, weight: Tensor, chunks: int, needed: tuple[bool, bool]) -> Any:
        return float8_gradients(grad, x, weight, kind, chunks, needed)

    by_rows = SharedScales(lambda x: float8.row_scales(x).squeeze(-1), float8_products.layout_of(kind))
    return Format(
        lambda x, weight, chunks: float8_linear(x, weight, kind, chunks), grouped, sums, _unrounded, _unrounded,
        shared=by_rows if kind.startswith("rowwise") else None, gradients=gradients,
    )  # fmt: skip


def _unrounded(x: Tensor) -> Tensor:
    return x


NONE = "none"
"""The format of the tensors themselves."""
FORMATS = {
    NONE: Format(linear, grouped_linear, product_sums, _unrounded, _unrounded),
    "int8": _int8(),
    "int4": _int4(32),
    "int4_128": _int4(128),
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
    if (form := FORMS.get(type(weight))) is not None:
        out: Tensor = form.formatted_linear(x, weight, format, chunks)
        return out
    return FORMATS[format].linear(x, weight, chunks)
