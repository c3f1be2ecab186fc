"""Models that sample or score on this rank: the policy's, with its current weights, and those without gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lockstep.config import CompileConfig, ParallelConfig, PrecisionConfig
from lockstep.hub import local_folder
from lockstep.model import (
    Decoder,
    ModelConfig,
    TrainableModel,
    load_weights,
    read_config,
    refuse_few_bytes,
    refuse_score_head,
    resolve_dtype,
)
from lockstep.model.decoder import Block
from lockstep.model.known_operators import refuse_unknown_operators
from lockstep.model.shard import local_values
from lockstep.parallel import World, apply_compile, generator_layout, generator_model
from lockstep.rl.weights.in_place import materialize
from lockstep.rl.weights.transfer import WeightTransfer


def folder_shape(folder: Path, name: str) -> ModelConfig:
    """The shape of a folder's language model. Raises UserError if it is not one, or weights are missing.

    name: the setting's value, for messages.
    """
    shape = read_config(folder)
    refuse_score_head(shape, name)
    refuse_few_bytes(folder, shape)
    return shape


def sampling_model(
    policy: TrainableModel, world: World, dtype: str, parallel: ParallelConfig, compile: CompileConfig
) -> Decoder:
    """The model that this rank samples from: in one process the policy itself, else one sharded over the tensor axis.

    Its parameters share the policy's memory where the layouts allow it (`in_place`). The others have no values until a
    `WeightTransfer` copies them. Raises UserError if its forward uses operators not known to be batch-invariant.
    """
    if isinstance(policy, Decoder) and world.mesh is None:
        # On the uncompiled layers: compiled ones hide their operators.
        compiled, policy.halves = policy.halves, Block
        refuse_unknown_operators(policy)
        policy.halves = compiled
        return policy
    model = generator_layout(policy.config, resolve_dtype(dtype), world, _tensor_only(parallel))
    fitting = materialize(model, dict(policy.named_parameters()), world.device)
    if compile.backend != "none":
        # Compilation compares outputs on these values, and uninitialized memory may hold NaN, which equals nothing.
        draws = torch.Generator(world.device).manual_seed(0)
        for name, parameter in model.named_parameters():
            if name not in fitting:
                local_values(parameter.detach()).normal_(std=0.1, generator=draws)
    if world.tensor_group is None:
        refuse_unknown_operators(model)
    # A value function reads it too, and over tensor ranks their rows are shared, as the trainer's are.
    apply_compile(model, compile, trains=world.tensor_group is not None)
    return model


class PolicyReplica:
    """A model with the policy's weights that one rank, or one tensor group, runs without the other ranks."""

    def __init__(
        self,
        model: Decoder,
        policy: TrainableModel,
        world: World,
        keep_copy: bool = True,
        moved: Callable[[], None] = lambda: None,
    ):
        """model: as made by `sampling_model`. policy: as trained. keep_copy: as `ActorsConfig`. moved: as
        `WeightTransfer`."""
        self.model = model
        tensors = dict(policy.named_parameters())
        frozen = [name for name, tensor in tensors.items() if not tensor.requires_grad]
        self._transfer = None if model is policy else WeightTransfer(tensors, model, world, moved, keep_copy, frozen)

    def load_weights(self, version: int) -> None:
        """Copies the trainer's current weights. All ranks call it. Raises RunStopped as `Generators` does."""
        if self._transfer:
            self._transfer(version)

    def pause(self, before_drop: Callable[[], None]) -> None:
        """Frees copied weights until `load_weights`, unless they are kept; calls `before_drop` first."""
        if self._transfer and not self._transfer.keep:
            before_drop()
            self._transfer.drop()

    @property
    def model_while_paused(self) -> Decoder | None:
        """As `Generators.policy_while_paused`."""
        return self.model if self._transfer is None or self._transfer.keep else None


def frozen_model(folder: str, world: World, dtype: str, parallel: ParallelConfig) -> Decoder:
    """A folder's model in the run's dtype, sharded over the tensor axis only; it only samples, or only scores."""
    path = local_folder(folder)
    shape, fill = folder_shape(path, folder), partial(load_weights, path=path)
    shape = replace(shape, precision=PrecisionConfig().of_model(shape.precision, compared=True))
    return generator_model(shape, resolve_dtype(dtype), world, _tensor_only(parallel), fill)


def _tensor_only(parallel: ParallelConfig) -> ParallelConfig:
    return ParallelConfig(tensor=parallel.tensor, reduction_chunks=parallel.reduction_chunks)
