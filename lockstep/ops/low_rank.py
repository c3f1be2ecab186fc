"""The update of a low-rank adapter, for all rows of a product or for some."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import native
from lockstep.ops.forms import FORMS
from lockstep.ops.linear import input_gradient, linear, weight_gradient
from lockstep.ops.packed_weights import packed


class LowRank(NamedTuple):
    """What `add_low_rank` adds to a product."""

    a: Float[Tensor, "rank in"]
    b: Float[Tensor, "out rank"]
    scaling: float
    rows: Int[Tensor, "adapted"] | None = None
    """int64; None: all of them."""

    def of(self, rows: Int[Tensor, "rows"] | slice) -> LowRank:
        """What it adds to the product of these rows alone, which may repeat."""
        if self.rows is None:
            return self
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=self.rows.device)
        return self._replace(rows=torch.isin(rows, self.rows).nonzero()[:, 0])

    def gradients(
        self, grad: Float[Tensor, "rows out"], x: Float[Tensor, "rows in"]
    ) -> tuple[Float[Tensor, "adapted in"], Float[Tensor, "rank in"], Float[Tensor, "out rank"]]:
        """Gradients of `x` in its rows, of A and of B, given that of the sum; rounded where autograd rounds those of
        `add_low_rank`."""
        if self.rows is not None:
            grad, x = grad.index_select(0, self.rows), x.index_select(0, self.rows)
        scaled = grad * self.scaling
        of_inner, inner = input_gradient(scaled, self.b), linear(x, self.a)
        return input_gradient(of_inner, self.a), weight_gradient(of_inner, x), weight_gradient(scaled, inner)


def add_low_rank(
    out: Float[Tensor, "rows out"],
    x: Float[Tensor, "rows in"],
    a: Float[Tensor, "rank in"],
    b: Float[Tensor, "out rank"],
    scaling: float,
    rows: Int[Tensor, "adapted"] | None = None,
) -> Float[Tensor, "rows out"]:
    """`out + scaling · B A x` (arXiv 2106.09685), for these rows, int64; None: for all of them. Without gradients, it
    may be written into `out`.

    Both products are rounded to the dtype of `x`, as are the scaled update and the sum: four roundings, so that a row's
    bits are the same in any batch, with or without gradients, and in one kernel or in an operator each. Raises
    ValueError for factors that do not match. That `rows` are rows of `out` is not checked.
    """
    if (x.shape[1], a.shape[0], (x.shape[0], b.shape[0])) != (a.shape[1], b.shape[1], tuple(out.shape)):
        shapes = [list(each.shape) for each in (out, x, a, b)]
        raise ValueError(f"an adapter's update needs out, x, A and B of matching shapes, but these are {shapes}")
    if not x.dtype == a.dtype == b.dtype == out.dtype:
        raise ValueError(f"an adapter's update needs one dtype: out, x, A, B are {[t.dtype for t in (out, x, a, b)]}")
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _is_plain(out, x, a, b):
        _in_one_kernel(out, x, a, b, scaling, rows)
        return out
    if rows is None:
        return out + linear(linear(x, a), b) * scaling
    update = linear(linear(x.index_select(0, rows), a), b) * scaling
    return out.index_copy(0, rows, out.index_select(0, rows) + update)


def _is_plain(*tensors: Tensor) -> bool:
    return all(native.usable(each) and type(each) not in FORMS and each.is_contiguous() for each in tensors)


def _in_one_kernel(out: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, rows: Tensor | None) -> None:
    count = x.shape[0] if rows is None else rows.shape[0]
    panels = [None if native.is_pretending() else packed(matrix, count) for matrix in (a, b)]
    sizes = (count, x.shape[1], *b.shape[::-1])
    native.call("add_low_rank", x.dtype, x, rows, a, panels[0], b, panels[1], out, *sizes, float(scaling))
