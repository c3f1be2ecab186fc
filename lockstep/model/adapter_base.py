"""Compares an adapter's base with the weights for which it was trained, by their digest."""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from pathlib import Path

import torch

from lockstep.errors import UserError
from lockstep.model.adapter_folder import LOCKSTEP_SETTINGS, base_folder, lockstep_settings
from lockstep.model.folder import open_tensors, tensor_files


def refuse_other_base(folder: Path, base: Path | None = None) -> None:
    """Raises UserError if the weights in `base`, by default the adapter's base, are not those of its training run.

    An adapter without a recorded digest, such as one from `peft`, works with any base of its shapes.
    """
    base = base_folder(folder) if base is None else base
    recorded = lockstep_settings(folder).get("base_digest")
    if recorded and (actual := digest(base)) != recorded:
        raise UserError(
            f"{folder}: is an adapter for other weights than those in {base}: their digest is {actual}, but that of "
            f"the adapter's base is {recorded}; give its own base with --base DIR, or delete {LOCKSTEP_SETTINGS} there "
            "to use it with this one anyway"
        )


def digest(folder: Path) -> str:
    """Digest of the names, dtypes, shapes and checksums of all tensors in a model folder, however they are split into
    files."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, path in tensor_files(folder).items():
        by_file[path].append(name)
    lines = []
    for path, names in by_file.items():
        file = open_tensors(path)
        for name in names:
            tensor = file.get_tensor(name)
            values = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            lines.append(f"{name} {tensor.dtype} {list(tensor.shape)} {zlib.crc32(values):08x}")
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=16).hexdigest()
