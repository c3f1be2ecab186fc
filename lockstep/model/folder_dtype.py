"""The dtype to compute a folder's model in."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import torch

from lockstep import ops
from lockstep.errors import UserError
from lockstep.hub import is_local, named_path
from lockstep.model.adapter_folder import base_folder
from lockstep.model.config_json import config_values
from lockstep.model.dtypes import DTYPES, is_auto, name_of, resolve_dtype
from lockstep.model.folder import FLOATS
from lockstep.model.stored import is_adapter, is_float32
from lockstep.model.tensors import stored_tensors


def choose_dtype(wanted: str, model: str, device: torch.device) -> tuple[str, str]:
    """`dtype = "auto"`: a folder's dtype; for fresh weights, the one that is fastest on the device.

    Resolves `wanted` (a dtype, `auto` or empty) for `model` (a folder, or fresh weights), and gives the reason.
    The same on all machines of a kind: nothing is measured. Raises UserError for an unknown dtype, and for a folder
    with an unsupported one.
    """
    if not is_auto(wanted):
        return name_of(resolve_dtype(wanted)), ""
    if is_local(model):
        return name_of(folder_dtype(named_path(model))), "the folder's own"
    if device.type != "cpu":
        return "bfloat16", "which GPUs train faster in"
    if ops.arithmetic() in ("bf16_pairs", "bf16_tiles"):
        return "bfloat16", "for which this processor has instructions"
    return "float32", "since this arithmetic widens bfloat16"


def folder_dtype(folder: Path) -> torch.dtype:
    """The dtype to compute a folder's model in. Raises UserError if it is neither bfloat16 nor float32."""
    dtype, origin = stored_dtype(folder)
    if dtype not in DTYPES.values():
        raise UserError(f"{origin} {name_of(dtype)}; give dtype bfloat16 or float32 to convert the weights")
    return dtype


def stored_dtype(folder: Path) -> tuple[torch.dtype, str]:
    """The dtype in the folder's configuration or, if there is none, that of most of the tensors' bytes; and its origin,
    as the beginning of a sentence. Raises UserError for a configuration whose dtype torch does not have."""
    values, where = config_values(base_folder(folder))
    text = values.get("text_config")
    for part in (values, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if (name := part.get(key)) is not None:
                dtype = getattr(torch, name_of(name), None) if isinstance(name, str) else None
                if not isinstance(dtype, torch.dtype):
                    raise UserError(f"{where}: {key} is {name!r:.100}; it must be a dtype, such as bfloat16")
                return dtype, f"{where}: {key} is"
    return _commonest(folder), f"{folder}: most of its tensors are"


def _commonest(folder: Path) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for name, tensor in stored_tensors(folder).items():
        dtype = FLOATS.get(tensor.get_dtype())
        # A router's bias is float32 in any folder.
        if dtype is not None and not is_float32(name) and not is_adapter(name):
            sizes[dtype] += dtype.itemsize * math.prod(tensor.get_shape())
    return max(sizes, key=lambda dtype: (sizes[dtype], dtype.itemsize), default=torch.bfloat16)
