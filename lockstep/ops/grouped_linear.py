"""The product of grouped rows, each group with a separate weight: the experts of a mixture.

A group's product is one chain along K for each element, as `linear` computes it on a CPU, so a row's bits depend only
on that row and its group's weight. On NVIDIA GPUs it is one kernel for all groups, which reads where they start on the
device (`cuda/grouped_linear.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import cuda, native
from lockstep.ops.linear import by_library, input_gradient, product, weight_gradient
from lockstep.ops.opaque import Operator
from lockstep.ops.packed_weights import PLAIN, Layout, packed
from lockstep.ops.step_graph import unrecorded


def grouped_linear(
    x: Float[Tensor, "rows in"], weight: Float[Tensor, "groups out in"], starts: Int[Tensor, "groups+1"]
) -> Float[Tensor, "rows out"]:
    """Rows `starts[g]` to `starts[g + 1]` of `x`, times `weight[g].T`. `starts`, int64, ends with the number of rows.

    Raises ValueError if `starts` do not match these rows and groups. Starts on a GPU are not checked, which would
    require synchronizing with it.
    """
    return _grouped_linear(x, weight, starts)


def _product(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    check_groups(x, weight, starts)
    x = x.contiguous()
    if x.is_meta:
        return x.new_empty(x.shape[0], weight.shape[1])
    if cuda.usable(x):
        return _triton().product(x, weight, starts)
    if not native.usable(x):
        return by_group(x, weight, starts, product, x.new_empty(x.shape[0], weight.shape[1]))
    return native_grouped_product(x, weight, starts, group_panels(x, weight))


def native_grouped_product(x: Tensor, weight: Tensor, starts: Tensor, panels: Tensor | None) -> Tensor:
    """The compiled product. It only reads the panels if there are any."""
    groups, outputs, depth = weight.shape
    out = x.new_empty(x.shape[0], outputs)
    native.call("grouped_product", x.dtype, x, weight, *weight.stride(), panels, out, starts, groups, depth, outputs)
    return out


def _triton() -> Any:
    from lockstep.ops.cuda import grouped_linear

    return grouped_linear


def check_groups(x: Tensor, weight: Tensor, starts: Tensor) -> None:
    """Raises ValueError as `grouped_linear` does."""
    if x.shape[1] != weight.shape[2] or x.dtype != weight.dtype or starts.shape[0] != weight.shape[0] + 1:
        raise ValueError(
            f"a grouped product needs rows with the weights' width and dtype, and a start per group and the end, but "
            f"has {list(x.shape)} {x.dtype}, {list(weight.shape)} {weight.dtype} and {starts.shape[0]} starts"
        )
    usable = starts.dtype == torch.int64 and starts.is_contiguous() and starts.device.type in ("cpu", x.device.type)
    if not usable or (starts.device.type == "cpu" and not native.is_pretending() and _wrong(starts, x.shape[0])):
        raise ValueError(
            f"starts must be ascending int64 on the CPU or the rows' device, from 0 to the {x.shape[0]} rows"
        )


def _wrong(starts: Tensor, rows: int) -> bool:
    with unrecorded():  # a replayed step graph gets the starts from the kernel that sorts rows by expert
        values = starts.tolist()
    return values[0] != 0 or values[-1] != rows or any(a > b for a, b in zip(values, values[1:]))


def group_panels(x: Tensor, weight: Tensor, layout: Layout = PLAIN) -> Tensor | None:
    """The panels of all groups' weights that a product with the rows of `x` can read instead."""
    if native.is_pretending() or not weight.is_contiguous():
        return None
    return packed(weight, x.shape[0] // weight.shape[0], layout)


def by_group(x: Tensor, weight: Tensor, starts: Tensor, one: Any, out: Tensor) -> Tensor:
    """Writes `one(rows, matrix)` of every group to its rows of `out`."""
    bounds = starts.tolist()
    for group, (first, stop) in enumerate(zip(bounds, bounds[1:])):
        if stop > first:
            out[first:stop] = one(x[first:stop], weight[group])
    return out


def grouped_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, starts: Tensor, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `x` and of `weight`."""
    grad = grad.contiguous()
    grad_x = _input_gradient(grad, weight, starts) if needed[0] else None
    return grad_x, _weight_gradient(grad, x.contiguous(), starts) if needed[1] else None


def _by_library(grad: Tensor) -> bool:
    """As for `linear`, except with pairs of bfloat16: a library is slower at many small products."""
    pairs = native.usable(grad) and native.arithmetic() == "bf16_pairs"
    return by_library(grad) and not pairs and not native.is_pretending()


def _grouped_by_library(grad: Tensor, other: Tensor) -> bool:
    return _by_library(grad) and cuda.usable(grad) and _triton().has_library(grad, other)


def _input_gradient(grad: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    if _grouped_by_library(grad, weight):
        return _triton().input_gradient(grad, weight, starts)
    if _by_library(grad) and not cuda.usable(grad):
        return by_group(grad, weight, starts, input_gradient, grad.new_empty(grad.shape[0], weight.shape[2]))
    return _product(grad, weight.transpose(1, 2), starts)


def _weight_gradient(grad: Tensor, x: Tensor, starts: Tensor) -> Tensor:
    groups = starts.shape[0] - 1
    if _grouped_by_library(grad, x):
        return _triton().weight_gradient(grad, x, starts)
    if _by_library(grad):
        out = grad.new_zeros(groups, grad.shape[1], x.shape[1])
        bounds = starts.tolist()
        for group, (first, stop) in enumerate(zip(bounds, bounds[1:])):
            if stop > first:
                out[group] = weight_gradient(grad[first:stop], x[first:stop])
        return out
    out = grad.new_empty(groups, grad.shape[1], x.shape[1])
    native.call("grouped_outer", grad.dtype, grad, x, out, starts, groups, grad.shape[1], x.shape[1])
    return out


_grouped_linear = Operator(
    "grouped_linear(Tensor x, Tensor weight, Tensor starts) -> Tensor",
    _product,
    fake=lambda x, weight, starts: x.new_empty(x.shape[0], weight.shape[1]),
    gradients=grouped_gradients,
    kind="linear",
)
