"""The models of a run on this rank: the policy as it is trained and as it samples, and those that only score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from lockstep.config import ParallelConfig, RLConfig, algorithm_of
from lockstep.errors import UserError
from lockstep.hub import local_folder
from lockstep.model import (
    Decoder,
    TrainableModel,
    begin_adapter,
    load_weights,
    read_config,
    refuse_few_bytes,
    refuse_score_head,
    resolve_dtype,
)
from lockstep.model.decoder import Block
from lockstep.model.known_operators import refuse_unknown_operators
from lockstep.model.shard import local_values
from lockstep.parallel import World, apply_compile, chunks_for, generator_layout, generator_model, parallel_model
from lockstep.parallel.refusals import refuse_generators
from lockstep.rl.weights.in_place import lay_out
from lockstep.train.adapter import adapted


def policy_model(config: RLConfig, world: World) -> TrainableModel:
    """This rank's part of the policy, laid out as `config.parallel` says. Raises UserError as `parallel_model` does."""
    folder = local_folder(config.model)
    shape = read_config(folder)
    refuse_score_head(shape, config.model)
    refuse_few_bytes(folder, shape)
    fill: Callable[[TrainableModel], None] = partial(load_weights, path=folder)
    if config.lora.rank:
        shape = adapted(shape, config.lora, config.model)
        fill = partial(begin_adapter, path=folder, seed=config.seed)
    if shape.lora is not None and config.actors.urls:
        raise UserError(
            f"{folder}: is an adapter, but servers (actors.urls) need full weights; use actors.generators, or merge it "
            "first: lockstep convert --merge"
        )
    biased = shape.experts is not None and shape.experts.choice_bias
    travels = world.size > 1 or config.actors.separate
    if biased and travels and resolve_dtype(config.dtype) != torch.float32:
        raise UserError(
            f"{folder}: its router has a float32 expert bias, but weights are sent to the generators as "
            f"{config.dtype}, which would round it; give --dtype float32, or run in one process"
        )
    if config.actors.processes:
        # They would find out themselves, but only once the run has started.
        chunks = chunks_for(shape.reduction_chunks, config.parallel)
        refuse_generators(replace(shape, reduction_chunks=chunks), config.actors.tensor)
    kind = resolve_dtype(config.dtype)
    return parallel_model(shape, kind, world, config.parallel, config.compile, fill, config.recompute)


def sampling_model(config: RLConfig, world: World, policy: TrainableModel) -> Decoder:
    """What this rank's generator reads: the policy itself in one process, else a model sharded over the tensor axis.

    Its parameters are the policy's own where the layouts allow it (`own_weights`). The others have no values until a
    `WeightTransfer` brings them. Raises UserError if its forward uses operators not known to be batch-invariant.
    """
    if isinstance(policy, Decoder) and world.mesh is None:
        # On the uncompiled layers: compiled ones hide their operators.
        compiled, policy.halves = policy.halves, Block
        refuse_unknown_operators(policy)
        policy.halves = compiled
        return policy
    parallel = ParallelConfig(tensor=config.parallel.tensor, reduction_chunks=config.parallel.reduction_chunks)
    model = generator_layout(policy.config, resolve_dtype(config.dtype), world, parallel)
    fitting = lay_out(model, dict(policy.named_parameters()), world.device)
    if config.compile.backend != "none":
        # It is compared on these: whatever the memory held before might not be equal to itself.
        draws = torch.Generator(world.device).manual_seed(0)
        for name, parameter in model.named_parameters():
            if name not in fitting:
                local_values(parameter.detach()).normal_(std=0.1, generator=draws)
    if world.tensor_group is None:
        refuse_unknown_operators(model)
    # A value function reads it too, and over tensor ranks their rows are shared, as the trainer's are.
    apply_compile(model, config.compile, trains=world.tensor_group is not None)
    return model


def frozen_model(folder: str, config: RLConfig, world: World) -> Decoder:
    """A folder's model in the run's dtype, sharded over the tensor axis only; it only samples, or only scores."""
    path = local_folder(folder)
    shape = read_config(path)
    refuse_score_head(shape, folder)
    refuse_few_bytes(path, shape)
    parallel = ParallelConfig(tensor=config.parallel.tensor, reduction_chunks=config.parallel.reduction_chunks)
    fill = partial(load_weights, path=path)
    return generator_model(shape, resolve_dtype(config.dtype), world, parallel, fill)


def refuse_on_ranks(config: RLConfig, world: World) -> None:
    """Raises UserError for what a run on several ranks does not support yet."""
    if world.size == 1:
        return
    if algorithm_of(config).advantage == "gae" and config.train.optimizer_in_backward:
        raise UserError(
            f"algorithm {config.algorithm} trains a value head, whose gradient is summed over ranks after the "
            "backward; turn train.optimizer_in_backward off"
        )
    generators = 1 if config.actors.separate else world.size // world.degrees["tensor"]
    if config.oversampling_factor > 1 and config.train.deterministic_layout and generators > 1:
        raise UserError(
            f"oversampling_factor {config.oversampling_factor:g} takes the first groups of each rank that samples, so "
            "the run depends on the number of ranks, which train.deterministic_layout rules out; use "
            "actors.generators, or remove one of the two"
        )
