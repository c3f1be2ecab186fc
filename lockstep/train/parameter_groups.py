"""The optimizer settings of each parameter: the run's, overridden by the rules that match its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from lockstep.config import TrainConfig
from lockstep.config.rules import parse_rule
from lockstep.errors import UserError, closest
from lockstep.model.stored import is_float32

MATRICES = (2, 3)
"""Number of dimensions of a matrix, and of the stacked matrices of experts: what Muon trains."""


@dataclass(frozen=True)
class Settings:
    """How one parameter is updated; parameters with equal settings are updated together."""

    optimizer: str = "adamw"
    learning_rate: float = 1.0
    """Relative to the schedule's."""
    weight_decay: float = 0.0
    frozen: bool = False


def settings_of(shapes: Mapping[str, torch.Size], config: TrainConfig) -> dict[str, Settings]:
    """The settings of every parameter, by name; if several rules match, the later ones win, key by key.

    `shapes` has the parameters of the whole model, since a rule that matches none of them is refused. Raises UserError
    for rules that cannot be followed.
    """
    settings = {name: _default(name, shape, config) for name, shape in shapes.items()}
    for rule in config.rules:
        pattern, changes = parse_rule(rule)
        matching = [name for name in settings if fnmatchcase(name, pattern)]
        if not matching:
            hint = closest(pattern, settings) or f" Parameter names are {', '.join([*settings][:4])}, …"
            raise UserError(f'train.rules "{rule}": no parameter has such a name.{hint}')
        for name in matching:
            settings[name] = dataclasses.replace(settings[name], **changes)
            if settings[name].optimizer == "muon" and len(shapes[name]) not in MATRICES:
                raise UserError(f'train.rules "{rule}": {name} is not a matrix, which Muon needs; use adamw for it')
    return settings


def _default(name: str, shape: torch.Size, config: TrainConfig) -> Settings:
    if is_float32(name):
        return Settings(frozen=True)  # changed by the load, not by a gradient
    bias = name.endswith("bias")  # experts have a row each
    muon = config.optimizer == "muon" and len(shape) in MATRICES and name.startswith("layers.") and not bias
    decayed = len(shape) > 1 and not bias
    return Settings("muon" if muon else "adamw", weight_decay=config.weight_decay if decayed else 0.0)
