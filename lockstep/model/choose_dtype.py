"""`dtype = "auto"`: a folder's dtype; for fresh weights, the one that is fastest on the device."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep import ops
from lockstep.model.dtypes import is_auto, resolve_dtype
from lockstep.model.folder import folder_dtype


def choose_dtype(wanted: str, model: str, device: torch.device) -> tuple[str, str]:
    """Resolves `wanted` (a dtype, `auto` or empty) for `model` (a folder, or fresh weights), and gives the reason.

    The same on all machines of a kind: nothing is measured. Raises UserError for an unknown dtype, and for a folder
    with an unsupported one.
    """
    if not is_auto(wanted):
        return name_of(resolve_dtype(wanted)), ""
    if Path(model).is_dir():
        return name_of(folder_dtype(Path(model))), "the folder's own"
    if device.type != "cpu":
        return "bfloat16", "which GPUs train faster in"
    if ops.arithmetic() in ("bf16_pairs", "bf16_tiles"):
        return "bfloat16", "for which this processor has instructions"
    return "float32", "since this arithmetic widens bfloat16"


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
