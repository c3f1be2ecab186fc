"""A trainer's tensors by their names in a checkpoint.

`model/` has the model under Hugging Face's names, in the run's dtype. With an adapter, `adapter/` has the adapter under
`peft`'s names instead. `trainer/` has `KIND.PARAMETER`: the float32 masters (unless the model's files have them) and
the optimizer's moments, including those of parameters outside the model. `random/` has each rank's generators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lockstep.checkpoint.part import Part
from lockstep.checkpoint.random_state import random_state, set_random_state
from lockstep.checkpoint.storage import StoredTensor
from lockstep.errors import UserError
from lockstep.model import ModelConfig, TrainableModel
from lockstep.model.stored import adapter_name, is_float32, is_saved_with_adapter, is_score_head

STEMS = {"model": "model", "adapter": "adapter_model", "trainer": "trainer/optimizer", "random": "trainer/random"}
"""The files of each group, within a checkpoint's folder."""


@runtime_checkable
class Optimizer(Protocol):
    """An optimizer with float32 masters by parameter name, and all state by `KIND.PARAMETER`."""

    masters: dict[str, Tensor]

    def state_tensors(self) -> dict[str, Tensor]: ...
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None: ...


def tensors_to_save(
    model: TrainableModel, optimizer: Optimizer, dtype: torch.dtype, rank: int, model_only: bool = False
) -> dict[str, tuple[Part, torch.dtype]]:
    """This rank's tensors, sharing memory with those in use, each with the dtype to save it in."""
    masters, of_model = optimizer.masters, {f"master.{name}" for name, _ in model.named_parameters()}
    tensors = {
        f"{group}/{stored}": (part, torch.float32 if is_float32(name) else dtype)
        for name, parameter, group in _saved(model)
        for stored, part in _stored(name, masters.get(name, parameter), group, model.config).items()
    }
    if model_only:
        return tensors
    for name, tensor in optimizer.state_tensors().items():
        if not (dtype == torch.float32 and name in of_model):
            tensors[f"trainer/{name}"] = (Part.of(tensor), tensor.dtype)
    for kind, tensor in random_state().items():
        tensors[f"random/{rank}.{kind}"] = (Part.of(tensor), tensor.dtype)
    return tensors


def _saved(model: TrainableModel) -> Iterator[tuple[str, Tensor, str]]:
    """Name, parameter and group of what a checkpoint saves: with an adapter, only the adapter."""
    group = "model" if model.config.lora is None else "adapter"
    for name, parameter in model.named_parameters():
        if group == "model" or is_saved_with_adapter(name):
            yield name, parameter, group


def _stored(name: str, tensor: Tensor, group: str, config: ModelConfig) -> dict[str, Part]:
    """`Part.stored`; a score head of an adapter has its name in the adapter's file."""
    if group == "adapter" and is_score_head(name):
        return {adapter_name(name, config): Part.of(tensor)}
    return Part.stored(name, tensor, config)


def parts_to_load(
    folder: Path, stored: Mapping[str, StoredTensor], model: TrainableModel, optimizer: Optimizer, rank: int
) -> tuple[dict[str, Part], dict[str, Tensor], dict[str, Tensor]]:
    """What to read from a checkpoint that has the tensors `stored`, by name.

    Returns the parts to fill, the optimizer's tensors and the random state, which share the parts' memory. They and
    the model are filled in place. Raises UserError for a checkpoint of another model.
    """
    masters: dict[str, Tensor] = optimizer.masters
    current = optimizer.state_tensors()
    parts: dict[str, Part] = {}
    state: dict[str, Tensor] = {}
    for name, parameter, group in _saved(model):
        target = masters.get(name, parameter).detach()
        targets = {f"trainer/master.{name}": Part.of(target)}
        if name not in masters or targets.keys() - stored.keys():
            targets = {f"{group}/{saved}": part for saved, part in _stored(name, target, group, model.config).items()}
        for saved, part in targets.items():
            if saved not in stored or stored[saved].shape != part.shape:
                shape = list(stored[saved].shape) if saved in stored else []
                what = f"shape {shape}, not {list(part.shape)}" if saved in stored else "no such tensor"
                raise UserError(
                    f"{folder}: is a checkpoint of a different model ({name}: {what}); give its --model and --tokenizer"
                )
        parts |= targets
        if name in masters:
            state[f"master.{name}"] = target
    for saved, entry in stored.items():
        group, _, name = saved.partition("/")
        if group == "trainer" and name in current and name not in state:
            if (current[name].shape, current[name].dtype) == (entry.shape, entry.dtype):
                state[name] = current[name]
                parts[saved] = Part.of(state[name])
            else:  # which the optimizer refuses
                state[name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    random = {
        name.removeprefix(f"random/{rank}."): torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in stored.items()
        if name.startswith(f"random/{rank}.")
    }
    parts |= {f"random/{rank}.{kind}": Part.of(tensor) for kind, tensor in random.items()}
    return parts, state, random


def load_training_state(optimizer: Optimizer, state: dict[str, Tensor], random: dict[str, Tensor]) -> None:
    """Loads optimizer and random generators; a rank that the saved run did not have keeps its random state."""
    optimizer.load_state_tensors(state)
    if random:
        set_random_state(random)
