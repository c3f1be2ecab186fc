"""The family that comes nearest to an unknown architecture, and how the two differ."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
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
NUMBER = re.compile(r"\.\d+\.")


class Difference(NamedTuple):
    """How a folder's settings differ from what a family reads."""

    values: dict[str, Any]
    """Keys with another value than the only supported one, with that one."""
    keys: list[str]
    """Keys that the family does not know."""
    problem: str
    """Why the family does not read the other keys; empty: it does."""
    config: ModelConfig | None
    """What it reads from them."""

    @property
    def size(self) -> tuple[int, bool]:
        return len(self.values) + len(self.keys) + bool(self.problem), bool(self.problem)


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
    differences = {name: _difference(values, where, family, read) for name, family in families.items()}
    least = min(difference.size for difference in differences.values())
    found = {} if values.get("quantization_config") else _by_pattern(tensors)
    others = {name: _tensors(each.config, found) for name, each in differences.items() if each.size == least}

    def distance(name: str) -> tuple[float, ...]:
        absent = sum(key not in values for key in families[name].DEFAULTS)
        kinds = str(values.get("model_type"))[:100], families[name].MODEL_TYPE
        alike = difflib.SequenceMatcher(None, *kinds).ratio()
        return sum(map(len, others[name])), kinds[0][:RELATED] != kinds[1][:RELATED], absent, -alike

    name = min(others, key=distance)
    different, (unknown, lacking) = differences[name], others[name]
    parts = [
        f"{key} is {one_line(repr(values[key]), 40)} (only {supported!r:.40})"
        for key, supported in [*different.values.items()][:MOST_NAMED]
    ]
    parts += [f"keys {_listed(different.keys)}"] if different.keys else []
    parts += [different.problem] if different.problem else []
    parts += [f"tensors {_listed(unknown)}"] if unknown else []
    parts += [f"no tensors {_listed(lacking)}"] if lacking else []
    if not parts:
        known = f"The nearest family is {name} ({families[name].ARCHITECTURE})"
        return f"{known}, which reads all keys; the models may differ in what no key says"
    return f"The nearest family is {name}; what differs: {'; '.join(parts)}"


def _difference(
    values: dict[str, Any], where: str, family: ModuleType, read: Callable[[dict[str, Any], str], ModelConfig]
) -> Difference:
    wrong, unknown = unsupported(values, family), unknown_keys(values, family)
    left = {key: value for key, value in values.items() if key not in wrong and key not in unknown}
    left |= {"model_type": family.MODEL_TYPE, "architectures": [family.ARCHITECTURE]}
    left.pop("quantization_config", None)
    try:
        with warnings.catch_warnings(action="ignore"):
            return Difference(wrong, unknown, "", read(left, where))
    except UserError as error:
        return Difference(wrong, unknown, one_line(str(error).removeprefix(f"{where}: "), 120), None)


def _tensors(config: ModelConfig | None, found: dict[str, str]) -> tuple[list[str], list[str]]:
    """The folder's tensors that such a model lacks, and those of the model that the folder lacks: of the layers and
    experts, one for each name."""
    import torch

    from lockstep.model.decoder import Decoder
    from lockstep.model.stored import stored_as

    if config is None or not found or config.num_parameters > LARGEST:
        return [], []
    config = replace(config, num_layers=min(config.num_layers, LAYERS))
    parameters = Decoder(config, torch.float32, "meta").named_parameters()
    parts = (part.name for name, parameter in parameters for part in stored_as(name, parameter.shape, config))
    expected = _by_pattern(parts)
    return [found[name] for name in found.keys() - expected], [expected[name] for name in expected.keys() - found]


def _by_pattern(tensors: Iterable[str]) -> dict[str, str]:
    """The first tensor for each name without the numbers of layers and experts."""
    named: dict[str, str] = {}
    for name in tensors:
        named.setdefault(NUMBER.sub(".*.", name), name)
    return named


def _listed(names: Collection[str]) -> str:
    shown = [one_line(name, 60) for name in sorted(names)[:MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
