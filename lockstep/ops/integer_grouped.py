"""`grouped_linear` of 8- and 4-bit integers: each group's product is that of `int8_linear` or `int4_linear`.

Gradients are those of `grouped_linear` of the rounded factors.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import cuda, native, plain
from lockstep.ops.grouped_linear import by_group, check_groups, grouped_gradients, grouped_linear
from lockstep.ops.integer_linear import (
    check_group_size,
    layout_of,
    quantized_rows,
    quantized_weight,
    rounded_rows,
    rounded_weight,
)
from lockstep.ops.opaque import Operator
from lockstep.ops.packed_weights import PackedWeight, integer_panels
from lockstep.ops.saved_outputs import saved_output

EXACT_DEPTH = 1024
"""Products of 8-bit codes whose sum is below 2^24, so exact in float32 in any order."""


def integer_grouped_linear(
    x: Float[Tensor, "rows in"],
    weight: Float[Tensor, "groups out in"],
    starts: Int[Tensor, "groups+1"],
    group: int = 0,
) -> Float[Tensor, "rows out"]:
    """Rows `starts[g]` to `starts[g + 1]` of `x`, times `weight[g].T`, as `int8_linear` computes it, or with a `group`
    of numbers along K `int4_linear`.

    Raises ValueError for factors or a group that do not match, and as `grouped_linear` does.
    """
    if isinstance(weight, PackedWeight):
        out: Tensor = _PackedGroupedLinear.apply(x, weight, starts, group)
        return out
    return _grouped_linear(x, weight, starts, group)


def _product(x: Tensor, weight: Tensor, starts: Tensor, group: int) -> Tensor:
    check_groups(x, weight, starts)
    check_group_size(x, group)
    groups, outputs, depth = weight.shape
    if x.is_meta or native.is_pretending():
        return x.new_empty(x.shape[0], outputs)
    if not native.usable(x):
        return _plain(x, weight, starts, group)
    x, out, layout = x.contiguous(), x.new_empty(x.shape[0], outputs), layout_of(group)
    sizes = (groups, depth, outputs, *((group,) if group else ()))
    name = f"grouped_int{layout.bits}_product"
    native.call(name, x.dtype, x, integer_panels(weight, layout), out, starts, *sizes)
    return out


def _plain(x: Tensor, weight: Tensor, starts: Tensor, group: int) -> Tensor:
    matrices, rows = weight.flatten(0, 1), torch.arange(x.shape[0], device=x.device)
    codes, scales = quantized_rows(x, group)
    others, of_outputs = quantized_weight(matrices, group) if group else quantized_rows(matrices)
    owner = torch.searchsorted(starts.to(x.device), rows, right=True) - 1
    total = x.new_zeros(x.shape[0], weight.shape[1], dtype=torch.float32)
    for g in range(codes.shape[1]):
        sums = _integer_sums(codes[:, g], others[:, g].view(len(weight), -1, codes.shape[2]), starts)
        of_output = of_outputs[:, g].view(len(weight), -1)[owner]
        if not group:
            total = sums * scales[:, g] * of_output
        else:
            total = plain.multiply_add(sums * of_output, scales[:, g].expand_as(sums), total)
    return total.to(x.dtype)


def _integer_sums(codes: Tensor, others: Tensor, starts: Tensor) -> Tensor:
    """The exact sums of each group's products, rounded to float32."""
    out = codes.new_zeros(codes.shape[0], others.shape[1], dtype=torch.float64)
    if not cuda.usable(codes):
        return by_group(codes.double(), others.double(), starts, lambda rows, matrix: rows @ matrix.T, out).float()
    # Without reading on the CPU where groups start, so that a CUDA graph can hold it.
    for part, of_part in zip(codes.split(EXACT_DEPTH, 1), others.split(EXACT_DEPTH, 2)):
        out += grouped_linear(part, of_part.contiguous(), starts)
    return out.float()


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, starts: Tensor, group: int, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    x = rounded_rows(x, group) if needed[1] else x
    return grouped_gradients(grad, x, rounded_weight(weight, group) if needed[0] else weight, starts, needed)


_grouped_linear = Operator(
    "integer_grouped_linear(Tensor x, Tensor weight, Tensor starts, int group) -> Tensor",
    _product,
    fake=lambda x, weight, starts, group: x.new_empty(x.shape[0], weight.shape[1]),
    gradients=_gradients,
    kind="linear",
)


class _PackedGroupedLinear(torch.autograd.Function):
    """With a packed weight, which has no gradient: only the starts are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight, starts: Tensor, group: int) -> Tensor:
        ctx.save_for_backward(starts)
        ctx.weight, ctx.group = weight, group
        return saved_output("linear", lambda: _product(x, weight, starts, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (starts,) = ctx.saved_tensors
        weight = rounded_weight(ctx.weight, ctx.group)
        return grouped_gradients(grads[0], grads[0], weight, starts, (True, False))[0], None, None, None
