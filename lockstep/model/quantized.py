"""The quantized forms of folders: which method of `quantization_config` is read by what."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from lockstep.errors import UserError
from lockstep.model.compressed_tensors import CompressedTensors
from lockstep.model.fp8 import Fp8
from lockstep.model.mxfp4 import Mxfp4Experts
from lockstep.model.stored_tensor import StoredTensor
from lockstep.model.torchao import TorchAo

Dequantize = Callable[[dict[str, StoredTensor]], dict[str, StoredTensor]]
"""From a folder's tensors, those of its unquantized model: weights take the place of the parts as which they are
stored, and are dequantized as they are read."""
FORMATS: dict[str, Callable[[dict[str, Any], str], Dequantize]] = {
    "fp8": Fp8,
    "compressed-tensors": CompressedTensors,
    "torchao": TorchAo,
    "mxfp4": Mxfp4Experts,
}
"""By `quant_method`, what reads the settings and raises UserError, naming the key after `where`."""
INSTEAD = (
    'load it in transformers with dequantize=True in its quantization config and dtype="bfloat16", and call '
    "save_pretrained"
)


def dequantize_of(values: dict[str, Any], where: str, only: Collection[str] = FORMATS) -> Dequantize:
    """How to read the tensors of the folder with this `config.json`, unchanged without a `quantization_config`.

    `where` names the file in errors, `only` the methods that its family has. Raises UserError for another method, and
    for settings that are not supported.
    """
    settings = values.get("quantization_config") or {}
    if not settings:
        return dict
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
    if not isinstance(method, str) or method not in only or not isinstance(settings, dict):
        raise UserError(
            f"{where}: quantization_config: the weights are quantized ({method!r:.100}), which is not supported "
            f"(supported: {', '.join(only)}, unquantized floats). Convert the folder first: " + INSTEAD
        )
    return FORMATS[method](settings, f"{where}: quantization_config")
