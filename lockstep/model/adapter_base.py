"""Whether the weights in a folder are those that an adapter was trained for: by their digest."""

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
    """Raises UserError if the weights in `base`, by default the folder's own, are not those of the adapter's run.

    An adapter that does not say, such as one from `peft`, works with any base of its shapes.
    """
    base = base_folder(folder) if base is None else base
    recorded = lockstep_settings(folder).get("base_digest")
    if recorded and (found := digest(base)) != recorded:
        raise UserError(
            f"{folder}: is an adapter for other weights than those in {base}: their digest is {found}, but that of the "
            f"adapter's base is {recorded}; give its own base with --base DIR, or delete "
            f"{LOCKSTEP_SETTINGS} there to use it with this one anyway"
        )


def digest(folder: Path) -> str:
    """Digest of all tensors in a model folder, in whichever files: their names, dtypes, shapes and checksums."""
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
