"""Weights, gradients and optimizer state sharded over the ranks that see different data (FSDP2; HSDP; DDP)."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from lockstep.config import ParallelConfig
from lockstep.model import Decoder
from lockstep.model.shard import local_values
from lockstep.model.stored import is_float32
from lockstep.parallel.exchange import ExchangedSum, SumOverReplicas
from lockstep.parallel.tensor import experts_of
from lockstep.parallel.world import World

WHOLE_GRADIENT_SHARE = 4
"""An unsharded gradient of at most this fraction (1/N) of a rank's memory is kept until the end of a step."""


def shard_data_parallel(model: Decoder, world: World, config: ParallelConfig, compute: torch.dtype) -> None:
    """Shards the float32 weights of `model`, block by block; forward and backward run in `compute`.

    A step's loss is a sum whose weights add up to 1 over all ranks, so gradients are summed in float32, not averaged.
    With `data_shard` 1, each replica keeps unsharded weights: data parallelism as in DDP.
    """
    always = {"default": world.degrees["pipeline"] == 1, "always": True, "never": False}[config.reshard_after_forward]
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    # Unsharded on every rank: they have no gradient to sum, and must not be rounded to `compute`.
    whole = {parameter for name, parameter in model.named_parameters() if is_float32(name)}
    shared_experts = [] if world.expert_mesh is None else experts_of(model)
    for module in [*shared_experts, *model.layers, model]:
        # The root contains embedding and head, which the loss needs after the forward: they stay until the backward.
        fully_shard(
            module,
            mesh=world.expert_fsdp_mesh if module in shared_experts else world.fsdp_mesh,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=whole,
            shard_placement_fn=partial(_cut_experts, world),
            reshard_after_forward=always and module is not model,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # gloo has no pre-multiplied sum; the plain sum is right on every backend.
        module.set_force_sum_reduction_for_comms(True)
        if world.device.type == "cpu":
            shared = 1 if module in shared_experts else world.degrees["context"]
            module.set_custom_reduce_scatter(ExchangedSum(shared))  # type: ignore[arg-type]
        if world.replicas is not None and module not in shared_experts:
            module.set_all_reduce_hook(SumOverReplicas(world.replicas))


def _cut_experts(world: World, parameter: nn.Parameter) -> Shard | None:
    """Stacked experts are sharded along the first dimension, like all weights, if every rank gets equally many;
    otherwise, as with more ranks than experts, each expert is sharded along its outputs."""
    ranks = world.degrees["data_shard"] * world.degrees["context"] // world.expert
    experts, outputs, *others = (*local_values(parameter).shape, 0)
    return Shard(1) if len(others) == 2 and experts % ranks and outputs % ranks == 0 else None


def sums_every_microbatch(parameters: int, world: World) -> bool:
    """Whether ranks sum the gradients of so many parameters after every micro-batch, so that each keeps only its shard.

    Otherwise once per step: fewer messages, but until then every rank has the unsharded float32 gradient of its tensor
    part.
    """
    if world.degrees["data_shard"] * world.degrees["context"] == 1 or world.degrees["pipeline"] > 1:
        return False  # Nothing is sharded, or the pipeline's schedule sums at its end.
    if world.reduce_gradients != "auto":
        return world.reduce_gradients == "microbatch"
    return 4 * parameters / world.degrees["tensor"] > world.memory / WHOLE_GRADIENT_SHARE


def set_gradient_sums(model: FSDPModule, every: bool, last: bool) -> None:
    """Call before a micro-batch's forward: sets whether its backward sums gradients over ranks.

    They are summed if `every` is set or it is the `last` of a step. Replicas of the shards exchange sums once per step
    in any case, except more than two on CPUs, which exchange them together with the shards.
    """
    model.set_requires_gradient_sync(every or last)
    model.set_requires_all_reduce(last)
