"""The operators on weights that are cut over ranks: each reads this rank's part and exchanges what has to be summed.

Activations are plain tensors of what this rank holds. Where they lie on the `tensor` axis follows from where in a block
they are (`placements`), so nothing need say it. The operators of `ops` run unchanged on a rank's part; DTensor's own
would replace the row-invariant ones.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lockstep import ops
from lockstep.config.parallel import ROW_MULTIPLE
from lockstep.errors import UserError
from lockstep.ops.embedding import found_rows
from lockstep.parallel.exchange import exchanged, gather_rows, rows_are_whole, sum_gathered, sum_rows
from lockstep.parallel.one_order import column_product, shared_norm
from lockstep.parallel.placements import COLUMNS, COPY, SUM
from lockstep.parallel.row_product import row_product
from lockstep.parallel.vocabulary import sharded_token_log_probs


def own_part(weight: DTensor) -> Tensor:
    """What this rank computes with: on the tensor axis its part, on the others the whole.

    Where the weight is whole its ranks see different tokens or heads, so their gradients are summed.
    """
    axes = axes_of(weight.device_mesh)
    places = [place if axis == "tensor" else COPY for axis, place in zip(axes, weight.placements)]
    if not torch.is_grad_enabled() and list(weight.placements) == places:
        return weight.to_local()
    gradients = [SUM if place == COPY else place for place in places]
    # Of a parameter that lies as it is read this moves nothing, but its backward sums the copies' gradients.
    if list(weight.placements) != places or (weight.is_leaf and SUM in gradients):
        weight = weight.redistribute(placements=places)
    return weight.to_local(grad_placements=gradients)


def axes_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes. Raises ValueError where they have none: no rule could be found for them."""
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no names for its axes")
    return tuple(mesh.mesh_dim_names)


def tensor_group(weight: DTensor) -> dist.ProcessGroup | None:
    """The ranks that share the tensor axis; None where the weight's mesh has none."""
    mesh, axes = weight.device_mesh, axes_of(weight.device_mesh)
    return mesh.get_group(axes.index("tensor")) if "tensor" in axes else None


def place_on(tensor: DTensor, axis: str) -> Placement | None:
    """Where `tensor` lies on an axis; None where its mesh has no such axis."""
    return dict(zip(axes_of(tensor.device_mesh), tensor.placements)).get(axis)


def embedding(tokens: Tensor, weight: DTensor) -> Tensor:
    """This rank's share of the tokens' rows. Each is looked up where it is, elsewhere it is zero: the sum is exact.

    Raises UserError where the tensor axis does not divide the tokens.
    """
    own, group = own_part(weight), tensor_group(weight)
    if group is None:
        return ops.embedding(tokens, own)
    ranks = dist.get_world_size(group)
    if tokens.shape[0] % ranks and not rows_are_whole():
        raise UserError(
            f"parallel.tensor {ranks} does not divide the {tokens.shape[0]} tokens of a micro-batch, which its ranks "
            f"share; pad them to a multiple of {ROW_MULTIPLE}"
        )
    length = -(-weight.shape[0] // ranks)
    first = dist.get_rank(group) * length
    held = (tokens >= first) & (tokens < first + own.shape[0])
    found = found_rows(torch.where(held, tokens - first, 0), own)
    found = torch.where(held[:, None], found, 0.0)
    if rows_are_whole():
        everyone = gather_rows(found, group).unflatten(0, (ranks, -1))
        return everyone[tokens // length, torch.arange(len(tokens), device=tokens.device)]
    return exchanged(found, group, sum_rows, gather_rows)


def rms_norm(x: Tensor, weight: DTensor, eps: float) -> Tensor:
    """Of this rank's rows `[tokens, dim]`, gathered then for all products that read them; or of its heads."""
    group = tensor_group(weight)
    if group is None:
        return ops.rms_norm(x, own_part(weight), eps)
    normed = shared_norm(x, own_part(weight), eps, group)
    if x.ndim > 2 or rows_are_whole():
        return normed
    return exchanged(normed, group, gather_rows, sum_gathered)


def linear(x: Tensor, weight: DTensor, chunks: int) -> Tensor:
    """A row product where the weight's inputs are cut over the tensor axis, else a column product."""
    own, group = own_part(weight), tensor_group(weight)
    if group is None:
        return ops.linear(x, own, chunks)
    if place_on(weight, "tensor") != COLUMNS:
        return column_product(x, own, group)
    return row_product(x, own, chunks, group)


def token_log_probs(hidden: Tensor, head: DTensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The loss over a vocabulary-sharded head; see `sharded_token_log_probs`."""
    own, group = own_part(head), tensor_group(head)
    if group is None:
        return ops.token_log_probs(hidden, own, targets, temperature)
    return sharded_token_log_probs(hidden, own, targets, temperature, head.shape[0], group)
