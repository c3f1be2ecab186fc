"""Folders that transformers saves of torchao's tensors: int8, int4 in int8, and float8.

Follows torchao 0.18 (`torchao.prototype.safetensors`): the file's metadata has each weight's class and its attributes.
Settings of activations are not used: products are computed with the weights' values.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import safe_open

from lockstep.errors import UserError
from lockstep.model.fp8 import block_size
from lockstep.model.scaled import Scaled
from lockstep.model.stored import in_language_model
from lockstep.model.stored_tensor import StoredTensor

CODES = {"Int8Tensor": "I8", "IntxUnpackedToInt8Tensor": "I8", "Float8Tensor": "F8_E4M3"}
"""The classes that are read, and the type of their codes in the file."""


class TorchAo:
    """No settings are read: they describe how the weights were quantized."""

    def __init__(self, settings: dict[str, Any], where: str):
        pass

    def __call__(self, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The folder's tensors, with weights in place of their parts. Raises UserError for another class."""
        described: dict[str, str] = {}
        for file in {tensor.file for tensor in stored.values()}:
            described |= _metadata(file)
        weights = dict(stored)
        for name, codes in stored.items():
            if not (part := re.fullmatch(r"(.+\.)_(\w+)_qdata", name)):
                continue
            weight, before = part[1] + part[2], name.removesuffix("qdata")
            kind, block = _described(described.get(weight, ""), codes.file, weight)
            if CODES.get(kind) != codes.get_dtype():
                raise UserError(
                    f"{codes.file}: tensor {weight} is torchao's {kind:.40} in {codes.get_dtype()}; of its classes, "
                    f"only {', '.join(CODES)} are read. Load the folder in transformers, replace the weight of each "
                    "quantized module by module.weight.dequantize(), delete model.config.quantization_config, and call "
                    "save_pretrained"
                )
            if before + "scale" not in stored:
                raise UserError(f"{codes.file}: tensor {before}scale is missing, but {name} is there")
            del weights[name]
            scales, zero_points = weights.pop(before + "scale"), weights.pop(before + "zero_point", None)
            weights[weight] = Scaled(weight, codes, scales, block, zero_points)
        return weights


def _metadata(file: Path) -> dict[str, str]:
    """By the tensors' names in the language model."""
    with safe_open(file, framework="pt") as opened:
        return {in_language_model(name): value for name, value in (opened.metadata() or {}).items()}


def _described(text: str, file: Path, name: str) -> tuple[str, tuple[int, int]]:
    """A weight's class and the block of its scales."""
    try:
        values = json.loads(text)
        return str(values["_type"]), block_size(values["_data"]["block_size"][-2:], "block_size")
    except (ValueError, TypeError, KeyError, UserError) as error:
        raise UserError(
            f"{file}: tensor {name} is not described in the file's metadata as torchao does; download it again"
        ) from error
