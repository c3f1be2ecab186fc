"""Folders in float8 (`quant_method` fp8): e4m3 numbers, with a scale per block or per tensor, as DeepSeek-V3's.

Their activations' scales are not used: products are computed with the weights' values, not in float8.
"""

from __future__ import annotations

import re
from typing import Any

from lockstep.errors import UserError
from lockstep.model.scaled import Scaled
from lockstep.model.stored_tensor import StoredTensor

CODES = "F8_E4M3"
SCALES = ("_scale_inv", "_scale")
"""Suffixes of the scales' name after the weight's: DeepSeek's and transformers', and vLLM's. Values are multiplied by
either."""
WHOLE = (0, 0)
"""The block of a weight with one scale."""
ONLY = {"fmt": "e4m3", "expert_dtype": "fp8"}
"""Settings with one supported value."""
ACTIVATIONS = re.compile(r"\.(input|output|activation|[qkv])_(scale|scale_inv|zero_point)$")
"""Names of tensors for quantized activations and key-value caches."""


class Fp8:
    """Raises UserError, naming the key after `where`, for settings that describe no such folder."""

    def __init__(self, settings: dict[str, Any], where: str):
        size = settings.get("weight_block_size", [128, 128])
        self._block = WHOLE if size is None else block_size(size, f"{where}: weight_block_size")
        for key, only in ONLY.items():
            if settings.get(key, only) != only:
                raise UserError(f"{where}: {key} is {settings[key]!r:.100}; only {only!r} is supported")

    def __call__(self, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The folder's tensors, with weights in place of codes and scales. Raises UserError for missing scales."""
        weights = {name: tensor for name, tensor in stored.items() if not ACTIVATIONS.search(name)}
        for name, codes in stored.items():
            if codes.get_dtype() == CODES:
                scales = next((name + end for end in SCALES if name + end in stored), name + SCALES[0])
                if scales not in stored:
                    raise UserError(f"{codes.file}: tensor {name} is {CODES}, but {scales} is missing")
                weights[name] = Scaled(name, codes, weights.pop(scales), self._block)
        return weights


def block_size(value: Any, where: str) -> tuple[int, int]:
    """Rows and columns per scale. Raises UserError for anything else."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise UserError(f"{where} is {value!r:.100}; it must be a block's rows and columns")
    return value[0], value[1]
