"""`train.deterministic_layout`: the same bits for every layout. What it requires of a model, and what it refuses."""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.errors import UserError
from lockstep.model import TrainableModel
from lockstep.model.shard import is_fsdp
from lockstep.ops import one_order
from lockstep.parallel import Pipeline, World
from lockstep.parallel.compile import CompiledHalves


def share_rows(model: TrainableModel) -> None:
    """Makes every forward of `model` tell the gradient sums which ranks have the rest of its tokens and targets."""

    if isinstance(model, Pipeline):
        return  # `refuse_other_order` makes sure that it does not share tokens

    def tell(model: nn.Module, arguments: tuple[Any, ...]) -> None:
        attention = arguments[2]
        one_order.share(*(getattr(attention, name, None) for name in ("shared_tokens", "shared_targets")))

    assert isinstance(model, nn.Module)
    model.register_forward_pre_hook(tell)


def refuse_other_order(world: World, model: TrainableModel) -> None:
    """Raises UserError for a layout whose gradients are not summed in the order of train.deterministic_layout."""
    _refuse_uneven_keys(model)
    shared = [f"parallel.{axis} {world.degrees[axis]}" for axis in ("pipeline", "context", "tensor")]
    shared = [each for each in shared if not each.endswith(" 1")]
    if shared and world.device.type != "cpu":
        raise UserError(
            f"train.deterministic_layout with {', '.join(shared)} only works on CPUs so far, not on "
            f"{world.device.type}, whose libraries sum in their own order; switch it off"
        )
    if model.config.experts is not None and world.degrees["context"] > 1:
        raise UserError(
            f"train.deterministic_layout with parallel.context {world.degrees['context']} only works for dense models "
            "so far: the gradients of a mixture's experts are summed by rank; switch it off"
        )
    if world.degrees["tensor"] > model.config.num_kv_heads:
        _refuse_copied_heads(world, model)
    if world.device.type == "cuda" and world.data_size > 2:
        raise UserError(
            f"train.deterministic_layout works on up to 2 GPUs so far, not {world.data_size}, over which a library "
            "sums in its own order; switch it off"
        )
    if world.reduce_gradients == "step":
        raise UserError(
            "train.deterministic_layout sums gradients over ranks after every micro-batch; leave "
            'parallel.reduce_gradients at "auto"'
        )
    if world.degrees["data_replicate"] > 1 and world.degrees["data_shard"] & (world.degrees["data_shard"] - 1):
        raise UserError(
            "train.deterministic_layout sums in a binary tree of ranks, shards first: with parallel.data_replicate "
            f"{world.degrees['data_replicate']}, the number of shards must be a power of two and is "
            f"{world.degrees['data_shard']}; set parallel.data_replicate to 1 or {world.data_size}"
        )
    if world.data_size > 1 and not (is_fsdp(model) or isinstance(model, Pipeline)):
        raise UserError(
            "train.deterministic_layout does not work with parallel.full_dtensor over data-parallel ranks; switch one "
            "of them off"
        )


def _refuse_uneven_keys(model: TrainableModel) -> None:
    """Raises UserError if the key features cannot be divided into the parts that their gradient is summed in."""
    config, chunks = model.config, model.config.reduction_chunks
    keys = config.num_kv_heads * config.head_dim
    # In bfloat16, a product reads two features at once.
    if config.latent is None and chunks > 1 and keys % (2 * chunks):
        raise UserError(
            f"train.deterministic_layout sums gradients in parallel.reduction_chunks {chunks} parts, but twice that "
            f"number does not divide the {keys} features of this model's keys ({config.num_kv_heads} heads of "
            f"{config.head_dim}); lower parallel.reduction_chunks, and parallel.tensor with it, or switch it off"
        )


def _refuse_copied_heads(world: World, model: TrainableModel) -> None:
    """Raises UserError if the order is not kept with fewer key-value heads than tensor ranks."""
    problem = (
        f"train.deterministic_layout with parallel.tensor {world.degrees['tensor']} and fewer key-value heads "
        f"({model.config.num_kv_heads})"
    )
    if model.config.latent is not None or model.config.sinks:
        raise UserError(f"{problem} does not work with this model family yet; lower parallel.tensor, or switch it off")
    parts = model.stages if isinstance(model, Pipeline) else (model,)
    if any(isinstance(getattr(part, "halves", None), CompiledHalves) for part in parts):
        raise UserError(f"{problem} does not work with compile.backend yet; lower parallel.tensor, or compile nothing")
