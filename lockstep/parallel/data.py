"""Weights, gradients and optimizer state spread over the ranks that see different data (FSDP2; HSDP; DDP)."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lockstep.config import ParallelConfig
from lockstep.model import Decoder
from lockstep.parallel.exchange import ExchangedSum
from lockstep.parallel.world import World


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
