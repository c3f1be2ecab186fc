"""`train.deterministic_layout`: the same bits for every layout. What it requires of model and layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lockstep.config import ParallelConfig
from lockstep.model import ModelConfig, TrainableModel
from lockstep.ops import one_order
from lockstep.parallel import Pipeline, World


def share_rows(model: TrainableModel) -> None:
    """Makes every forward of `model` record, for the gradient sums, which ranks have the rest of its tokens and
    targets."""

    if isinstance(model, Pipeline):
        return  # its ranks share no tokens: `config.validation` refuses pipelines with context parallelism

    def record(model: nn.Module, arguments: tuple[Any, ...]) -> None:
        attention = arguments[2]
        one_order.share(*(getattr(attention, name, None) for name in ("shared_tokens", "shared_targets")))

    assert isinstance(model, nn.Module)
    model.register_forward_pre_hook(record)


def layout_problems(shape: ModelConfig, world: World, parallel: ParallelConfig) -> Iterator[str]:
    """A message for each reason why gradients would not be summed in the order of train.deterministic_layout."""
    yield from _key_problems(shape)
    shared = [f"parallel.{axis} {world.degrees[axis]}" for axis in ("pipeline", "context", "tensor")]
    shared = [each for each in shared if not each.endswith(" 1")]
    if shared and world.device.type != "cpu":
        yield (
            f"train.deterministic_layout with {', '.join(shared)} only works on CPUs so far, not on "
            f"{world.device.type}, whose libraries sum in their own order; switch it off"
        )
    if shape.experts is not None and world.degrees["context"] > 1:
        yield (
            f"train.deterministic_layout with parallel.context {world.degrees['context']} only works for dense models "
            "so far: the gradients of a mixture's experts are summed by rank; switch it off"
        )
    if world.degrees["tensor"] > shape.num_kv_heads:
        yield (
            f"train.deterministic_layout with parallel.tensor {world.degrees['tensor']} does not work with fewer "
            f"key-value heads ({shape.num_kv_heads}), whose gradients are summed by rank; lower parallel.tensor, or "
            "switch it off"
        )
    if world.device.type == "cuda" and world.data_size > 2:
        yield (
            f"train.deterministic_layout works on up to 2 GPUs so far, not {world.data_size}, over which a library "
            "sums in its own order; switch it off"
        )
    if world.degrees["data_replicate"] > 1 and world.degrees["data_shard"] & (world.degrees["data_shard"] - 1):
        yield (
            "train.deterministic_layout sums in a binary tree of ranks, shards first: with parallel.data_replicate "
            f"{world.degrees['data_replicate']}, the number of shards must be a power of two and is "
            f"{world.degrees['data_shard']}; set parallel.data_replicate to 1 or {world.data_size}"
        )
    if parallel.full_dtensor and world.data_size > 1:
        yield (
            "train.deterministic_layout does not work with parallel.full_dtensor over data-parallel ranks; switch one "
            "of them off"
        )


def _key_problems(shape: ModelConfig) -> Iterator[str]:
    """Key features that cannot be divided into the parts that their gradient is summed in."""
    chunks, keys = shape.reduction_chunks, shape.num_kv_heads * shape.head_dim
    # In bfloat16, a product reads two features at once.
    if shape.latent is None and chunks > 1 and keys % (2 * chunks):
        yield (
            f"train.deterministic_layout sums gradients in parallel.reduction_chunks {chunks} parts, but twice that "
            f"number does not divide the {keys} features of this model's keys ({shape.num_kv_heads} heads of "
            f"{shape.head_dim}); lower parallel.reduction_chunks, and parallel.tensor with it, or switch it off"
        )
