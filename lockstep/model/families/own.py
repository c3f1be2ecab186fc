"""Families in users' files: `my_family.py:NAME` is a size or a shape in the file, or a folder that the family reads.

A file has what the files of this folder have. Only a name that the user gives imports one, never a folder's settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import UserError, closest
from lockstep.hub import split_family
from lockstep.model.config import ModelConfig
from lockstep.model.families.rope import RopeKeys
from lockstep.python_file import import_file

OWN: dict[str, ModuleType] = {}
"""The files imported so far, by absolute path: the name of their family in `ModelConfig`."""
REQUIRED: dict[str, type] = {"ARCHITECTURE": str, "MODEL_TYPE": str, "CONSTANTS": dict, "DEFAULTS": dict}
OPTIONAL: dict[str, type] = {
    "PRESETS": dict, "ONLY": dict, "ALIASES": dict, "WITHOUT_EFFECT": set, "ROPE_KEYS": RopeKeys, "QUANTIZED": tuple,
}  # fmt: skip
DEFAULTS = ("rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings")
"""Keys of `config.json` that need a default."""
PAIRS = (("read_attention", "write_attention"), ("read_experts", "write_experts"))
FUNCTIONS = (*PAIRS[0], *PAIRS[1], "write_rope", "is_ignored")


def know_family(name: str | Path) -> None:
    """Imports the file of the family that a model's name begins with, so that this process reads its folders."""
    if file := split_family(name)[0]:
        own_family(file)


def own_family(file: str) -> ModuleType:
    """The family in a user's file, imported once per process. From then on, folders of its MODEL_TYPE are read with it.

    Raises UserError, naming the file, if it cannot be imported, lacks a constant or has one of a wrong kind.
    """
    path = str(Path(file).resolve())
    if path not in OWN:
        module = import_file(Path(file), "family", "FILE.py:NAME")
        _check(file, module)
        for other, known in OWN.items():
            if known.MODEL_TYPE == module.MODEL_TYPE:
                raise UserError(f'{file}: MODEL_TYPE is "{known.MODEL_TYPE}", as in {other}; give one of them another')
        OWN[path] = module
    return OWN[path]


def own_shape(file: str, name: str) -> ModelConfig:
    """The shape that `file:name` stands for: one of the file's PRESETS, or a ModelConfig. Raises UserError."""
    module, path = own_family(file), str(Path(file).resolve())
    sizes: dict[str, Any] = getattr(module, "PRESETS", {})
    if name in sizes:
        return _build(f'{file}: PRESETS["{name}"]', {**module.CONSTANTS, **sizes[name], "family": path})
    if isinstance(shape := getattr(module, name, None), ModelConfig):
        return dataclasses.replace(shape, family=path)
    known = [*sizes, *(key for key, value in vars(module).items() if isinstance(value, ModelConfig))]
    raise UserError(
        f'{file}:{name}: there is no folder "{name}", and the file has no size and no ModelConfig of that name.'
        f"{closest(name, known)} It has: {', '.join(known) or 'none; give it PRESETS'}"
    )


def _check(file: str, module: ModuleType) -> None:
    """Raises UserError for constants and functions that are missing or of a wrong kind."""
    for name, kind in (REQUIRED | OPTIONAL).items():
        if not hasattr(module, name) and name in REQUIRED:
            raise UserError(f"{file}: {name} is missing; a family's file has {', '.join(REQUIRED)}: see docs/models.md")
        value = getattr(module, name, None)
        if hasattr(module, name) and not isinstance(value, kind):
            raise UserError(f"{file}: {name} is {value!r:.60}; it must be of type {kind.__name__}")
    for name in FUNCTIONS:
        if hasattr(module, name) and not callable(getattr(module, name)):
            raise UserError(f"{file}: {name} is {getattr(module, name)!r:.60}; it must be a function")
    for pair in PAIRS:
        if len(found := [name for name in pair if hasattr(module, name)]) == 1:
            (lacking,) = set(pair) - set(found)
            raise UserError(f"{file}: has {found[0]} but no {lacking}, its inverse; add it")
    if not module.ARCHITECTURE.endswith("ForCausalLM"):
        raise UserError(f'{file}: ARCHITECTURE is "{module.ARCHITECTURE}"; its name must end in ForCausalLM')
    if missing := [key for key in DEFAULTS if key not in module.DEFAULTS]:
        raise UserError(f"{file}: DEFAULTS has no {', '.join(missing)}; say what a config.json without them means")
    _check_fields(f"{file}: CONSTANTS", module.CONSTANTS)
    for size, fields in getattr(module, "PRESETS", {}).items():
        if not isinstance(fields, dict):
            raise UserError(f'{file}: PRESETS["{size}"] is {fields!r:.60}; it must be a dict of fields of ModelConfig')
        _check_fields(f'{file}: PRESETS["{size}"]', fields)


def _check_fields(where: str, fields: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(ModelConfig)} - {"family"}
    if unknown := [name for name in fields if name not in known]:
        raise UserError(f"{where}: {unknown[0]} is not a field of ModelConfig.{closest(str(unknown[0]), known)}")


def _build(where: str, fields: Mapping[str, Any]) -> ModelConfig:
    required = [each.name for each in dataclasses.fields(ModelConfig) if each.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in fields]:
        raise UserError(f"{where}: lacks {', '.join(missing)}; set them there or in CONSTANTS")
    try:
        return ModelConfig(**fields)
    except (TypeError, UserError) as error:  # a value of a wrong type, or one that does not fit
        raise UserError(f"{where}: {error}") from error
