"""Weights, gradients and optimizer state spread over the ranks that see different data (FSDP2; HSDP; DDP)."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lockstep.config import ParallelConfig
from lockstep.model import Decoder
from lockstep.parallel.exchange import ExchangedSum
from lockstep.parallel.world import World

WHOLE_GRADIENT_SHARE = 4
"""A whole gradient of at most one part in so many of a rank's memory is kept until the end of a step."""


def shard_data_parallel(model: Decoder, world: World, config: ParallelConfig, compute: torch.dtype) -> None:
    """Shards the float32 weights of `model`, block by block; forward and backward run in `compute`.

    A step's loss is a sum whose weights add up to 1 over all ranks, so gradients are summed, in float32, not averaged.
    With `data_shard` 1 each replica keeps whole weights: data parallelism as DDP has it.
    """
    always = {"default": world.degrees["pipeline"] == 1, "always": True, "never": False}[config.reshard_after_forward]
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for module in [*model.layers, model]:
        # The root holds embedding and head, which the loss needs after the forward: they stay until the backward.
        fully_shard(
            module,
            mesh=world.fsdp_mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=always and module is not model,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # gloo knows no pre-multiplied sum; the plain sum is what is wanted on every backend.
        module.set_force_sum_reduction_for_comms(True)
        if world.device.type == "cpu":
            module.set_custom_reduce_scatter(ExchangedSum())  # type: ignore[arg-type]


def sums_every_microbatch(parameters: int, world: World) -> bool:
    """Whether ranks sum the gradients of so many parameters with every micro-batch, so that each keeps its shard only.

    Else once a step: fewer messages, but until then every rank holds the float32 gradient of its tensor part, whole.
    """
    if world.degrees["data_shard"] * world.degrees["context"] == 1 or world.degrees["pipeline"] > 1:
        return False  # Nothing is sharded, or the pipeline's schedule sums at its end.
    if world.reduce_gradients != "auto":
        return world.reduce_gradients == "microbatch"
    return 4 * parameters / world.degrees["tensor"] > world.memory / WHOLE_GRADIENT_SHARE


def set_gradient_sums(model: FSDPModule, every: bool, last: bool) -> None:
    """Before the forward of a micro-batch, the `last` of a step or not: whether its backward sums gradients over ranks.

    Replicas of the shards exchange sums once a step in any case.
    """
    model.set_requires_gradient_sync(every or last)
    model.set_requires_all_reduce(last)
