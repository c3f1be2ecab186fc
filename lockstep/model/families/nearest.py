"""The family that comes nearest to an unknown architecture, and how the two differ."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

from lockstep.errors import UserError, one_line
from lockstep.model.config import ModelConfig
from lockstep.model.families.keys import unknown_keys, unsupported

MOST_NAMED = 6
"""Names in a list of the message."""
LAYERS = 8
"""Layers whose tensors are compared: the first ones, in which every kind of layer appears."""
RELATED = 3
"""Letters at the beginning of related names, such as gemma and gemma3_text."""
LARGEST = 10**13
"""Parameters of the largest model whose tensors are compared."""


class Difference(NamedTuple):
    """How a folder differs from what a family reads."""

    values: dict[str, Any]
    """Keys with another value than the only supported one, with that one."""
    keys: list[str]
    """Keys that the family does not know."""
    problem: str = ""
    """Why the family does not read the other keys; empty: it does."""
    lacking: tuple[str, ...] = ()
    """Tensors of the family's model that the folder lacks; of the layers, one for each name."""
    unknown: tuple[str, ...] = ()
    """The folder's tensors that the family's model lacks."""

    @property
    def of_keys(self) -> int:
        """How many keys differ."""
        return len(self.values) + len(self.keys) + bool(self.problem)

    @property
    def of_tensors(self) -> int:
        """How many names of tensors differ."""
        return len(self.lacking) + len(self.unknown)


def nearest_family(
    values: dict[str, Any],
    where: str,
    families: Mapping[str, ModuleType],
    read: Callable[[dict[str, Any], str], ModelConfig],
    tensors: Collection[str],
) -> str:
    """A sentence about the family that reads most of a folder's settings and tensors, and about what it does not read.

    values: the contents of the file `where`. read: `from_hugging_face`. tensors: the folder's, which are not compared
    if there are none, or if they are quantized.
    """
    differences = {name: _difference(values, where, family, read, tensors) for name, family in families.items()}

    def distance(name: str) -> tuple[float, ...]:
        absent = sum(key not in values for key in families[name].DEFAULTS)
        kinds = str(values.get("model_type"))[:100], families[name].MODEL_TYPE
        alike = difflib.SequenceMatcher(None, *kinds).ratio()
        unrelated = kinds[0][:RELATED] != kinds[1][:RELATED]
        found = differences[name]
        return found.of_keys, bool(found.problem), found.of_tensors, unrelated, absent, -alike

    name = min(families, key=distance)
    different = differences[name]
    if not different.of_keys + different.of_tensors:
        known = f"The nearest family is {name} ({families[name].ARCHITECTURE})"
        return f"{known}, which reads all keys; the models may differ in what no key says"
    parts = [
        f"{key} is {one_line(repr(values[key]), 40)} (only {supported!r:.40})"
        for key, supported in [*different.values.items()][:MOST_NAMED]
    ]
    parts += [f"keys {_listed(different.keys)}"] if different.keys else []
    parts += [different.problem] if different.problem else []
    parts += [f"tensors {_listed(different.unknown)}"] if different.unknown else []
    parts += [f"no tensors {_listed(different.lacking)}"] if different.lacking else []
    return f"The nearest family is {name}; what differs: {'; '.join(parts)}"


def _difference(
    values: dict[str, Any],
    where: str,
    family: ModuleType,
    read: Callable[[dict[str, Any], str], ModelConfig],
    tensors: Collection[str],
) -> Difference:
    wrong, unknown = unsupported(values, family), unknown_keys(values, family)
    left = {key: value for key, value in values.items() if key not in wrong and key not in unknown}
    left |= {"model_type": family.MODEL_TYPE, "architectures": [family.ARCHITECTURE]}
    left.pop("quantization_config", None)
    try:
        with warnings.catch_warnings(action="ignore"):
            config = read(left, where)
    except UserError as error:
        return Difference(wrong, unknown, one_line(str(error).removeprefix(f"{where}: "), 120))
    if not tensors or values.get("quantization_config") or config.num_parameters > LARGEST:
        return Difference(wrong, unknown)
    expected = _patterns(_tensors(replace(config, num_layers=min(config.num_layers, LAYERS))))
    found = _patterns(tensors)
    lacking = [name for pattern, name in expected.items() if pattern not in found]
    others = [name for pattern, name in found.items() if pattern not in expected]
    return Difference(wrong, unknown, "", tuple(lacking), tuple(others))


def _tensors(config: ModelConfig) -> list[str]:
    """The names of the tensors of a folder with such a model."""
    import torch

    from lockstep.model.decoder import Decoder
    from lockstep.model.stored import stored_as

    parameters = Decoder(config, torch.float32, "meta").named_parameters()
    return [part.name for name, parameter in parameters for part in stored_as(name, parameter.shape, config)]


def _patterns(tensors: Collection[str]) -> dict[str, str]:
    """One tensor for each name without the numbers of layers and experts."""
    return {re.sub(r"\.\d+\.", ".*.", name): name for name in sorted(tensors, key=_in_order, reverse=True)}


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _listed(names: Collection[str]) -> str:
    shown = [one_line(name, 60) for name in [*names][:MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
