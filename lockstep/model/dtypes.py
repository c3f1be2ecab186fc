"""The dtypes that a model's weights can have."""

from __future__ import annotations

import torch

from lockstep.errors import UserError, closest

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def is_auto(wanted: str | torch.dtype) -> bool:
    """Whether the dtype is to be chosen automatically."""
    return wanted in ("", "auto")


def name_of(dtype: str | torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """`bfloat16` or `float32`, by name or as a torch.dtype. Raises UserError for any other."""
    name = name_of(dtype)
    if name not in DTYPES:
        raise UserError(f'dtype "{name}" is not supported.{closest(name, DTYPES)} Supported: {", ".join(DTYPES)}')
    return DTYPES[name]
