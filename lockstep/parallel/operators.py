"""The operators on DTensors: each brings its inputs to their declared places, runs on local tensors, and says where
the result lies.

DTensor's own operators would replace the row-invariant ones; here those run unchanged on what this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lockstep import ops
from lockstep.config.parallel import ROW_MULTIPLE
from lockstep.errors import UserError
from lockstep.parallel.placements import COLUMNS, OPERATORS, PLAIN_TENSORS, SUM
from lockstep.parallel.row_product import row_product
from lockstep.parallel.vocabulary import sharded_token_log_probs


class Placements(NamedTuple):
    """A rule over all axes of a mesh: for each tensor, its place on each axis."""

    inputs: tuple[tuple[Placement, ...], ...]
    gradients: tuple[tuple[Placement, ...], ...]
    output: tuple[Placement, ...]
    result: tuple[Placement, ...]


@cache
def placements(operator: str, axes: tuple[str, ...]) -> Placements:
    """The declared placements of an operator on a mesh with these axes."""
    rules = [OPERATORS[axis][operator] for axis in axes]
    return Placements(
        tuple(zip(*(rule.inputs for rule in rules))),
        tuple(zip(*(rule.gradients for rule in rules))),
        tuple(rule.output for rule in rules),
        tuple(rule.result for rule in rules),
    )


def run(operator: str, function: Callable[..., Tensor], *arguments: Tensor) -> DTensor:
    """`function` on this rank's parts of `arguments`, as declared for `operator`; at least one is a DTensor."""
    mesh = next(a.device_mesh for a in arguments if isinstance(a, DTensor))
    axes = axes_of(mesh)
    declared = placements(operator, axes)
    locals_ = [
        local(argument, mesh, place, gradient)
        for argument, place, gradient in zip(arguments, declared.inputs, declared.gradients)
    ]
    result = DTensor.from_local(function(*locals_), mesh, declared.output, run_check=False)
    return result if declared.result == declared.output else result.redistribute(placements=declared.result)


def local(argument: Tensor, mesh: DeviceMesh, place: tuple[Placement, ...], gradient: tuple[Placement, ...]) -> Tensor:
    """This rank's part of `argument` at `place`; its gradient comes back as `gradient` says."""
    if not isinstance(argument, DTensor):
        given = tuple(PLAIN_TENSORS[axis] for axis in axes_of(mesh))
        if given == place:
            return argument
        argument = DTensor.from_local(argument, mesh, given, run_check=False)
    if argument.placements != place or summed_in_backward(argument, gradient):
        argument = argument.redistribute(placements=place)
    return argument.to_local(grad_placements=gradient)


def summed_in_backward(argument: DTensor, gradient: tuple[Placement, ...]) -> bool:
    """Whether `argument` is a parameter whose copies see different tokens, so that their gradients must be summed.

    The backward of a redistribution does that. Where a parameter is read as it lies, it is made for its backward alone.
    """
    return argument.is_leaf and SUM in gradient


def axes_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes. Raises ValueError where they have none: no rule could be found for them."""
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no names for its axes")
    return tuple(mesh.mesh_dim_names)


def degree_of(mesh: DeviceMesh, axis: str) -> int:
    """The ranks along an axis; 1 where the mesh has no such axis."""
    axes = axes_of(mesh)
    return mesh.size(axes.index(axis)) if axis in axes else 1


def place_on(tensor: DTensor, axis: str) -> Placement | None:
    """Where `tensor` lies on an axis; None where its mesh has no such axis."""
    return dict(zip(axes_of(tensor.device_mesh), tensor.placements)).get(axis)


def embedding(tokens: Tensor, weight: DTensor) -> Tensor:
    """Of the tokens whose rows other ranks hold, zeros are looked up here: the sum over ranks is exact.

    Raises UserError where the tensor axis does not divide the tokens, which it shares from here on.
    """
    first, rows = first_row(weight), weight.shape[0]
    degree = degree_of(weight.device_mesh, "tensor")
    if tokens.shape[0] % degree:
        raise UserError(
            f"parallel.tensor {degree} does not divide the {tokens.shape[0]} tokens of a micro-batch, which its ranks "
            f"share; pad them to a multiple of {ROW_MULTIPLE}"
        )

    def look_up(tokens: Tensor, weight: Tensor) -> Tensor:
        if weight.shape[0] == rows:
            return ops.embedding(tokens, weight)
        held = (tokens >= first) & (tokens < first + weight.shape[0])
        found = F.embedding(torch.where(held, tokens - first, 0), weight)
        return torch.where(held[:, None], found, 0.0)

    return run("embedding", look_up, tokens, weight)


def first_row(weight: DTensor) -> int:
    """The first row of a vocabulary-sharded weight that this rank's part on the tensor axis begins with."""
    if place_on(weight, "tensor") is None:
        return 0
    axis = axes_of(weight.device_mesh).index("tensor")
    return weight.device_mesh.get_local_rank(axis) * -(-weight.shape[0] // weight.device_mesh.size(axis))


def rms_norm(x: Tensor, weight: DTensor, eps: float) -> Tensor:
    """Of the rows `[tokens, dim]`, or of each head `[tokens, heads, head_dim]`."""
    kind = "norm of tokens" if x.ndim == 2 else "norm of heads"
    return run(kind, lambda x, weight: ops.rms_norm(x, weight, eps), x, weight)


def linear(x: Tensor, weight: DTensor, chunks: int) -> Tensor:
    """A row product where the weight's inputs are cut over the tensor axis, else a column product."""
    if place_on(weight, "tensor") != COLUMNS:
        return run("column product", lambda x, weight: ops.linear(x, weight, chunks), x, weight)
    group = weight.device_mesh.get_group(axes_of(weight.device_mesh).index("tensor"))
    return run("row product", lambda x, weight: row_product(x, weight, chunks, group), x, weight)


def rotary(x: DTensor, cos: Tensor, sin: Tensor) -> Tensor:
    return run("rotary", ops.rotary, x, cos, sin)


def silu_mul(gate: DTensor, up: DTensor) -> Tensor:
    return run("silu_mul", ops.silu_mul, gate, up)


def attend(attention: ops.Attention, layer: int, q: DTensor, k: DTensor, v: DTensor) -> Tensor:
    """Each rank attends with its own heads."""
    return run("attend", lambda q, k, v: attention(layer, q, k, v), q, k, v)


def token_log_probs(hidden: Tensor, head: DTensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The loss over a vocabulary-sharded head; see `sharded_token_log_probs`."""
    mesh, axes = head.device_mesh, axes_of(head.device_mesh)
    declared = placements("column product", axes)
    weight = local(head, mesh, declared.inputs[1], declared.gradients[1])
    if "tensor" not in axes:
        return ops.token_log_probs(hidden, weight, targets, temperature)
    group = mesh.get_group(axes.index("tensor"))
    return sharded_token_log_probs(hidden, weight, targets, temperature, head.shape[0], group)
