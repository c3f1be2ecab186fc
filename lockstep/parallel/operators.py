"""Operators on sharded weights: each computes with this rank's part, and exchanges what has to be summed.

Activations are plain local tensors. Their placement on the `tensor` axis follows from their position in a block
(`placements`), so it is not recorded. The operators of `ops` run unchanged on local tensors; DTensor's operators are
not row-invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from lockstep import ops
from lockstep.config.parallel import ROW_MULTIPLE
from lockstep.errors import UserError
from lockstep.ops import one_order
from lockstep.ops.embedding import plain_embedding
from lockstep.ops.experts import FeedForward
from lockstep.ops.experts import mixture as plain_mixture
from lockstep.ops.formats import FORMATS, NONE
from lockstep.parallel.exchange import (
    exchanged,
    gather_rows,
    rows_are_whole,
    sum_gathered,
    sum_rows,
    without_gradient,
)
from lockstep.parallel.experts import experts_over_ranks
from lockstep.parallel.heads_norm import split_heads_norm
from lockstep.parallel.one_order import column_product, shared_bias, shared_logits, shared_norm
from lockstep.parallel.placements import COLUMNS, COPY, SUM
from lockstep.parallel.row_product import row_product
from lockstep.parallel.tensor_group import axes_of, tensor_group
from lockstep.parallel.vocabulary import sharded_token_log_probs


def own_part(weight: DTensor) -> Tensor:
    """The local weight: this rank's part on the tensor or expert axis, unsharded on the other axes.

    Ranks with the same weight see different tokens or heads, so their gradients are summed.
    """
    axes = axes_of(weight.device_mesh)
    places = [place if axis in ("tensor", "experts") else COPY for axis, place in zip(axes, weight.placements)]
    if not torch.is_grad_enabled() and list(weight.placements) == places:
        return weight.to_local()
    gradients = [SUM if place == COPY else place for place in places]
    # If the placements are already equal, this moves nothing, but its backward sums the replicas' gradients.
    if list(weight.placements) != places or (weight.is_leaf and SUM in gradients):
        weight = weight.redistribute(placements=places)
    return weight.to_local(grad_placements=gradients)


def own_rows(weight: DTensor, parts: Sequence[int]) -> Tensor:
    """This rank's share of each part's rows; the weight is whole on each rank of the tensor axis, and its gradient the
    sum over them."""
    local, group = own_part(weight), tensor_group(weight)
    if group is None:
        return local
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return torch.cat([part.chunk(ranks)[rank] for part in local.split(list(parts))])


def place_on(tensor: DTensor, axis: str) -> Placement | None:
    """The placement of `tensor` on an axis; None if its mesh has no such axis."""
    return dict(zip(axes_of(tensor.device_mesh), tensor.placements)).get(axis)


def embedding(tokens: Tensor, weight: DTensor) -> Tensor:
    """This rank's share of the embedded rows. A row is looked up on one rank and zero on the others: the sum is exact.

    Raises UserError if the tensor degree does not divide the number of tokens.
    """
    local, group = own_part(weight), tensor_group(weight)
    if group is None:
        return ops.embedding(tokens, local)
    ranks = dist.get_world_size(group)
    if tokens.shape[0] % ranks and not rows_are_whole():
        raise UserError(
            f"parallel.tensor {ranks} does not divide the {tokens.shape[0]} tokens of a micro-batch, which its ranks "
            f"share; pad them to a multiple of {ROW_MULTIPLE}"
        )
    length = -(-weight.shape[0] // ranks)
    first = dist.get_rank(group) * length
    is_local = (tokens >= first) & (tokens < first + local.shape[0])
    rows = plain_embedding(torch.where(is_local, tokens - first, 0), local)
    rows = torch.where(is_local[:, None], rows, 0.0)
    if rows_are_whole():
        of_ranks = gather_rows(rows, group).unflatten(0, (ranks, -1))
        return of_ranks[tokens // length, torch.arange(len(tokens), device=tokens.device)]
    return exchanged(rows, group, sum_rows, gather_rows)


def rms_norm(x: Tensor, weight: DTensor, eps: float, offset: bool) -> Tensor:
    """RMSNorm of this rank's rows `[tokens, dim]`, then gathered for the products that read them; or of its heads."""
    group = tensor_group(weight)
    if group is None:
        return ops.rms_norm(x, own_part(weight), eps, offset)
    normed = shared_norm(x, own_part(weight), eps, offset, group)
    if x.ndim > 2 or rows_are_whole():
        return normed
    return exchanged(normed, group, gather_rows, sum_gathered)


def branch_norm(x: Tensor, weight: DTensor, eps: float, offset: bool) -> Tensor:
    """RMSNorm of this rank's rows, which are not gathered."""
    local, group = own_part(weight), tensor_group(weight)
    return ops.rms_norm(x, local, eps, offset) if group is None else shared_norm(x, local, eps, offset, group)


def every_row(x: Tensor, weight: DTensor) -> Tensor:
    """The rows of all ranks of the weight's tensor axis."""
    group = tensor_group(weight)
    return x if group is None or rows_are_whole() else exchanged(x, group, gather_rows, sum_gathered)


def fused_linear(x: Tensor, weight: DTensor, parts: Sequence[int], format: str) -> Tensor:
    """A column product with this rank's share of each part's rows; the weight is whole on each rank of the tensor axis,
    and its gradient the sum over them."""
    own, group = own_rows(weight, parts), tensor_group(weight)
    if group is None:
        return FORMATS[format].linear(x, own, 1)
    return column_product(x, own, format, group.group_name)


def heads_norm(x: Tensor, weight: DTensor, eps: float, offset: bool) -> Tensor:
    """`ops.heads_norm` of this rank's heads; of all heads, if every rank has them.

    Every rank has fewer key heads than ranks, but gradients only of the one it attends with. This norm's gradients are
    linear in those of its result, so what ranks compute are parts of the sums, as before it.
    """
    local, group = own_part(weight), tensor_group(weight)
    if group is None or x.shape[1:].numel() == weight.shape[0]:
        return ops.heads_norm(x, local, eps, offset)
    return split_heads_norm(x, local, eps, offset, group)


def linear(x: Tensor, weight: DTensor, chunks: int) -> Tensor:
    return formatted_linear(x, weight, NONE, chunks)


def formatted_linear(x: Tensor, weight: DTensor, format: str, chunks: int) -> Tensor:
    """A row product if the weight's inputs are sharded over the tensor axis, else a column product."""
    local, group = own_part(weight), tensor_group(weight)
    if group is None:
        return FORMATS[format].linear(x, local, chunks)
    if place_on(weight, "tensor") != COLUMNS:
        return column_product(x, local, format, group.group_name)
    return row_product(x, local, format, chunks, group)


def text_scores(hidden: Tensor, head: DTensor) -> Tensor:
    """Each tensor rank has all rows and the whole head, so only one rank's gradient counts."""
    local, group = own_part(head), tensor_group(head)
    if group is not None and dist.get_rank(group) > 0:
        local = without_gradient(local)
        # In one order, `exchange.sum_gathered` takes each rank's rows of the gradient, instead of summing over ranks.
        hidden = hidden if one_order.is_required() else without_gradient(hidden)
    return ops.text_scores(hidden, local)


def add_bias(x: Tensor, bias: DTensor) -> Tensor:
    """Adds the bias to this rank's outputs if it is sharded over the tensor axis, else to its share of the rows."""
    local, group = own_part(bias), tensor_group(bias)
    if group is None or place_on(bias, "tensor") != COPY:
        return ops.add_bias(x, local)
    return shared_bias(x, local, group)


def head_linear(x: Tensor, weight: DTensor, first: int, stop: int, across: bool) -> Tensor:
    """`ops.head_linear` of this rank's heads."""
    return ops.head_linear(x, own_part(weight), first, stop, across)


def router_logits(x: Tensor, weight: DTensor) -> Tensor:
    """The logits of this rank's share of the rows; `x` has all rows on every tensor rank."""
    local, group = own_part(weight), tensor_group(weight)
    if group is None or rows_are_whole():
        return ops.router_logits(x, local)
    ranks = dist.get_world_size(group)
    return shared_logits(x.unflatten(0, (ranks, -1))[dist.get_rank(group)], local, group.group_name)


def route(logits: Tensor, routing: ops.Routing, bias: DTensor, load: ops.ExpertLoad | None) -> tuple[Tensor, Tensor]:
    """`ops.route`; the bias is replicated on every rank."""
    return ops.route(logits, routing, own_part(bias), load)


def mixture(
    feed_forward: FeedForward,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    parameters: tuple[DTensor, ...],
    shared: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """`ops.experts` or `ops.clamped_experts` of this rank's share of the tokens, through the experts on all ranks; see
    `experts_over_ranks`."""
    local, group = [own_part(parameter) for parameter in parameters], expert_group(parameters[0])
    if group is None:
        return plain_mixture(feed_forward, x, weights, chosen, tuple(local), shared)
    count = parameters[0].shape[0]
    return experts_over_ranks(
        x, weights, chosen, count, group, lambda rows, starts: feed_forward(rows, starts, *local), shared
    )


def expert_group(weight: DTensor) -> dist.ProcessGroup | None:
    """The ranks that share the experts: those of the tensor axis, or more; None if every rank has all experts."""
    mesh, axes = weight.device_mesh, axes_of(weight.device_mesh)
    return next((mesh.get_group(axis) for axis in axes if axis in ("tensor", "experts")), None)


def token_log_probs(
    hidden: Tensor, head: DTensor, targets: Tensor, temperature: float, terms: ops.HeadTerms
) -> tuple[Tensor, Tensor]:
    """The loss over a vocabulary-sharded head; see `sharded_token_log_probs`."""
    local, group = own_part(head), tensor_group(head)
    if group is None:
        return ops.token_log_probs(hidden, local, targets, temperature, terms)
    return sharded_token_log_probs(hidden, local, targets, temperature, head.shape[0], group, terms)
