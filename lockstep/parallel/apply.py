"""Builds this rank's model: layers, shards, recomputation and compiled halves, applied in the order they require.

Code for sharding is imported only with several ranks: DTensor and FSDP take most of a second to import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from lockstep.config import CompileConfig, ParallelConfig, RecomputeConfig
from lockstep.model import Decoder, ModelConfig, TrainableModel
from lockstep.model.shard import local_values
from lockstep.model.stored import is_float32
from lockstep.parallel.compile import apply_compile
from lockstep.parallel.deep_ep import use_deep_ep
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.recompute import apply_recompute
from lockstep.parallel.refusals import refuse_impossible
from lockstep.parallel.world import World


def parallel_model(
    config: ModelConfig,
    dtype: torch.dtype,
    world: World,
    parallel: ParallelConfig,
    compiled: CompileConfig,
    fill: Callable[[TrainableModel], None],
    recompute: RecomputeConfig | None = None,
) -> Decoder | Pipeline:
    """This rank's part of the model, on the world's device; only this part is ever materialized.

    `fill` writes the weights, or this rank's shards. In a world of one, the weights have `dtype`; with several ranks,
    they are float32 shards that are gathered in `dtype`. Raises UserError for a layout that the model's shape does not
    allow.
    """
    config = replace(config, reduction_chunks=chunks_for(config.reduction_chunks, parallel))
    refuse_impossible(config, world.degrees, parallel)
    use_deep_ep(parallel.expert_dispatcher == "deep_ep")
    model: Decoder | Pipeline
    if world.mesh is None:
        model = Decoder(config, dtype, world.device)
    elif parallel.full_dtensor:
        from lockstep.parallel.tensor import distribute_everything

        model = Decoder(config, dtype, "meta")
        distribute_everything(model, world)
        model.to_empty(device=world.device)
    else:
        from lockstep.parallel.data import shard_data_parallel
        from lockstep.parallel.tensor import shard_experts, shard_tensor_parallel

        pipelined = world.degrees["pipeline"] > 1
        model = (
            Pipeline(config, dtype, world, parallel, compiled) if pipelined else Decoder(config, torch.float32, "meta")
        )
        for part in _parts(model):
            shard_experts(part, world)
            shard_tensor_parallel(part, world)
            shard_data_parallel(part, world, parallel, dtype)
            part.to_empty(device="cpu" if parallel.cpu_offload else world.device)
            if parallel.cpu_offload:
                part.runs_on = world.device
    fill(model)
    _round(model, dtype)
    for part in _parts(model):
        apply_recompute(part, recompute or RecomputeConfig(), lambda: _passes_in_flight(model))
        apply_compile(part, compiled)
    return model


def generator_model(
    config: ModelConfig,
    dtype: torch.dtype,
    world: World,
    parallel: ParallelConfig,
    fill: Callable[[TrainableModel], None],
) -> Decoder:
    """This rank's part of a model that only generates: its weights have `dtype` and are sharded only over tensor ranks.

    Raises UserError for a degree that the model's shape does not allow.
    """
    model = generator_layout(config, dtype, world, parallel)
    model.to_empty(device=world.device)
    fill(model)
    return model


def generator_layout(config: ModelConfig, dtype: torch.dtype, world: World, parallel: ParallelConfig) -> Decoder:
    """As `generator_model`, but on the meta device, without memory for weights."""
    config = replace(config, reduction_chunks=chunks_for(config.reduction_chunks, parallel))
    refuse_impossible(config, world.degrees, parallel)
    model = Decoder(config, dtype, "meta")
    if world.mesh is not None:
        from lockstep.parallel.tensor import shard_tensor_parallel

        shard_tensor_parallel(model, world)
    return model


def chunks_for(trained_with: int, parallel: ParallelConfig) -> int:
    """`reduction_chunks` if set; by default as many as the tensor degree needs, but no fewer than in training."""
    return parallel.reduction_chunks or max(parallel.tensor, trained_with)


@torch.no_grad()
def _round(model: Decoder | Pipeline, dtype: torch.dtype) -> None:
    """Rounds float32 shards to `dtype`, as in one process, so that every layout starts from the same weights."""
    for name, parameter in model.named_parameters():
        values = local_values(parameter)
        if values.dtype != dtype and not is_float32(name):
            values.copy_(values.to(dtype))


def _parts(model: Decoder | Pipeline) -> tuple[Decoder, ...]:
    """The model, or this rank's pipeline stages."""
    return model.stages if isinstance(model, Pipeline) else (model,)


def _passes_in_flight(model: Decoder | Pipeline) -> int:
    return model.passes_in_flight if isinstance(model, Pipeline) else 1
