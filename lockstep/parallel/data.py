"""Weights, gradients and optimizer state sharded over the ranks that see different data (FSDP2; HSDP; DDP)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from lockstep.config import ParallelConfig
from lockstep.model import Decoder
from lockstep.model.shard import local_values
from lockstep.model.stored import is_float32
from lockstep.parallel.exchange import ExchangedSum, SumOverReplicas
from lockstep.parallel.tensor import experts_of
from lockstep.parallel.world import World


def shard_data_parallel(model: Decoder, world: World, config: ParallelConfig, compute: torch.dtype) -> None:
    """Shards the float32 weights of `model`, some blocks at a time; forward and backward run in `compute`.

    A step's loss is a sum whose weights add up to 1 over all ranks, so gradients are summed in float32, not averaged.
    With `data_shard` 1, each replica keeps unsharded weights: data parallelism as in DDP.
    """
    pipelined = world.degrees["pipeline"] > 1
    always = {"default": not pipelined, "always": True, "never": False}[config.reshard_after_forward]
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    # Unsharded on every rank: they have no gradient, and must not be rounded to `compute`.
    whole = {parameter for name, parameter in model.named_parameters() if is_float32(name)}
    shared_experts = [] if world.expert_mesh is None else experts_of(model)
    units: list[list[nn.Module]] = [[experts] for experts in shared_experts]
    units += [*_buckets([*model.layers], int(config.bucket_mib * 2**20), compute), [model]]
    for modules in units:
        module = modules[0]
        # The root contains embedding and head, which the loss needs after the forward: they stay gathered until the
        # backward.
        fully_shard(
            modules,
            mesh=world.expert_fsdp_mesh if module in shared_experts else world.fsdp_mesh,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=whole,
            shard_placement_fn=partial(_expert_placement, world),
            reshard_after_forward=always and module is not model,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # gloo has no pre-multiplied sum; the plain sum works on every backend.
        module.set_force_sum_reduction_for_comms(True)
        if world.device.type == "cpu":
            shared = 1 if module in shared_experts else world.degrees["context"]
            module.set_custom_reduce_scatter(ExchangedSum(shared))  # type: ignore[arg-type]
        if world.replicas is not None and module not in shared_experts:
            module.set_all_reduce_hook(SumOverReplicas(world.replicas))
    if model.config.tie_embeddings and compute != torch.float32 and not pipelined:  # stages: `TiedEmbedding`
        _round_tied_gradient(model, compute)


def _buckets(blocks: Sequence[nn.Module], most: int, compute: torch.dtype) -> list[list[nn.Module]]:
    """Consecutive blocks whose gathered weights fit into `most` bytes: each message has a cost besides its bytes."""
    buckets: list[list[nn.Module]] = []
    room = 0
    for block in blocks:
        nbytes = sum(local_values(parameter).numel() for parameter in block.parameters()) * compute.itemsize
        if buckets and nbytes <= room:
            buckets[-1].append(block)
            room -= nbytes
        else:
            buckets.append([block])
            room = most - nbytes
    return buckets


def _round_tied_gradient(model: Decoder, compute: torch.dtype) -> None:
    """Makes autograd add the gradients of a tied `model`'s embedding and head in `compute`, as in one process.

    If FSDP has set a wider `grad_dtype`, as in torch 2.15, both are converted to it before they are added. That sum,
    rounded, has the bits of a sum in `compute`, which is also computed in float32 and rounded. Call after
    `fully_shard(model)`, whose hook gathers the weights.
    """
    hooked: Tensor | None = None

    def hook(model: Decoder, arguments: Any) -> None:
        nonlocal hooked
        weight = model.embed_tokens.weight
        if weight is not hooked and weight.requires_grad:
            weight.register_hook(lambda grad: grad.to(compute).to(grad.dtype))
            hooked = weight

    model.register_forward_pre_hook(hook)


def _expert_placement(world: World, parameter: nn.Parameter) -> Shard | None:
    """Stacked experts are sharded along the first dimension, like all weights, if it divides evenly; otherwise, as with
    more ranks than experts, each expert is sharded along its outputs."""
    ranks = world.degrees["data_shard"] * world.degrees["context"] // world.expert
    experts, outputs, *rest = (*local_values(parameter).shape, 0)
    return Shard(1) if len(rest) == 2 and experts % ranks and outputs % ranks == 0 else None
