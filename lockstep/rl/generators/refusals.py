"""Combinations of policy, ranks and generators that do not work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from lockstep.config import ActorsConfig, ParallelConfig, RLConfig, algorithm_of
from lockstep.errors import UserError
from lockstep.model import ModelConfig, resolve_dtype
from lockstep.parallel import World, chunks_for
from lockstep.parallel.refusals import refuse_generators


def refuse_policy_for_generators(
    shape: ModelConfig, folder: Path, dtype: str, actors: ActorsConfig, parallel: ParallelConfig, world: World
) -> None:
    """Raises UserError if the generators cannot sample from the policy. folder: its weights, for the message."""
    if shape.lora is not None and actors.urls:
        raise UserError(
            f"{folder}: is an adapter, but servers (actors.urls) need full weights; use actors.generators, or merge it "
            "first: lockstep convert --merge"
        )
    biased = shape.experts is not None and shape.experts.choice_bias
    if biased and (world.size > 1 or actors.separate) and resolve_dtype(dtype) != torch.float32:
        raise UserError(
            f"{folder}: its router has a float32 expert bias, but weights are sent to the generators as {dtype}, which "
            "would round it; give --dtype float32, or run in one process"
        )
    if actors.processes:
        # The processes check it too, but only once the run has started.
        chunks = chunks_for(shape.reduction_chunks, parallel)
        refuse_generators(replace(shape, reduction_chunks=chunks), actors.tensor)


def refuse_replay_without_experts(config: RLConfig, shape: ModelConfig) -> None:
    """Raises UserError if `config.router_replay` has nothing to replay."""
    if config.router_replay and not shape.mixtures:
        raise UserError(f"router_replay is set, but {config.model} has no experts and hence no routes; remove it")


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
