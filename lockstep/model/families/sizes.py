"""The families' sizes by name."""

from __future__ import annotations

from dataclasses import replace

from lockstep.errors import UserError, closest
from lockstep.hub import split_family
from lockstep.model.config import ModelConfig
from lockstep.model.families.own import own_shape
from lockstep.model.families.registry import FAMILIES
from lockstep.model.families.settings import refuse_lossy

PRESETS = [f"{family}:{size}" for family, module in FAMILIES.items() for size in module.PRESETS]


def preset(name: str, vocab_size: int | None = None, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The shape named `family:size`, such as `qwen3:tiny` or `my_family.py:tiny`, optionally with another vocabulary.
    Raises UserError for an unknown name."""
    file, size = split_family(name)
    if file:
        shape = own_shape(file, size)
        shape = replace(shape, vocab_size=vocab_size or shape.vocab_size, eos_token_ids=eos_token_ids)
        refuse_lossy(shape)
        return shape
    family, _, size = name.partition(":")
    if name not in PRESETS:
        if name.endswith(".py"):
            raise UserError(f"{name}: which model of this family? Write {name}:SIZE or {name}:FOLDER")
        raise UserError(
            f'unknown model "{name}".{closest(name, PRESETS)} There is no folder with that name, and the known '
            f"sizes are: {', '.join(PRESETS)}"
        )
    fields = FAMILIES[family].CONSTANTS | FAMILIES[family].PRESETS[size]
    fields |= {"vocab_size": vocab_size} if vocab_size else {}
    return ModelConfig(family=family, eos_token_ids=eos_token_ids, **fields)
