"""A model folder's files: that of each tensor, their digest, and its end tokens."""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.errors import UserError
from lockstep.model.adapter_folder import (
    LOCKSTEP_SETTINGS,
    base_folder,
    lockstep_settings,
)
from lockstep.model.gguf import gguf_file, opened
from lockstep.model.json_file import read_json
from lockstep.model.stored import names_in_language_model

GENERATION = "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""The supported floating-point types of safetensors."""


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor in a folder with safetensors, by its name. Raises UserError for a file outside it.

    As in transformers, a single file takes precedence over an index, and an index only lists the files: all tensors in
    them are read, whether the index lists them or not.
    """
    listed = read_json(folder / INDEX).get("weight_map", {}) if (folder / INDEX).is_file() else {}
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise UserError(f"{folder / INDEX}: weight_map is not a table of file names; download it again")
    if (folder / SINGLE).is_file():
        listed = {}
    elif not (folder / INDEX).is_file():
        raise UserError(f"{folder}: neither {SINGLE} nor {INDEX}; only safetensors and GGUF are read, never pickles")
    names = sorted(set(listed.values())) or [SINGLE]
    for name in names:
        if "\0" in name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise UserError(f"{folder / INDEX}: names {name!r}, which is not in this folder; download it again")
        if not (folder / name).is_file():
            raise UserError(f"{folder / INDEX}: names {name}, which does not exist; download it again")
        _refuse_outside(folder, folder / name)
    return {tensor: folder / name for name in names for tensor in open_tensors(folder / name).keys()}  # noqa: SIM118


def _refuse_outside(folder: Path, file: Path) -> None:
    """Raises UserError for a link that points neither into the folder nor, in a snapshot of a Hugging Face cache, to
    the blobs next to the snapshots."""
    home, target = folder.resolve(), file.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise UserError(f"{file}: is a link to {target}, outside the model's folder; put the file itself there")


class TensorFile:
    """A safetensors file whose tensors are named by `names_in_language_model`."""

    def __init__(self, path: Path):
        self._file = safe_open(path, framework="pt")
        self._names = names_in_language_model(self._file.keys())

    def keys(self) -> list[str]:
        return list(self._names)

    def stored_name(self, name: str) -> str:
        return self._names[name]

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._names[name])

    def get_tensor(self, name: str) -> Any:
        return self._file.get_tensor(self._names[name])


def open_tensors(path: Path) -> TensorFile:
    """Raises UserError for a file that cannot be read."""
    try:
        return TensorFile(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error}); download it again") from error


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
    """Digest of the names, dtypes, shapes and checksums of all tensors in a model folder as they are stored, however
    they are split into files."""
    lines = [f"{name} {kind} {shape} {zlib.crc32(values):08x}" for name, kind, shape, values in _as_stored(folder)]
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=16).hexdigest()


def _as_stored(folder: Path) -> Iterator[tuple[str, object, list[int], memoryview]]:
    """Every tensor's name, type, shape and bytes, one file open at a time."""
    if (file := gguf_file(folder)) is not None:
        for name, part in opened(file).tensors.items():
            yield name, part.kind.name, part.get_shape(), part.bytes.data
        return
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, path in tensor_files(folder).items():
        by_file[path].append(name)
    for path, names in by_file.items():
        tensors = open_tensors(path)
        for name in names:
            tensor = tensors.get_tensor(name)
            values = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            yield name, tensor.dtype, list(tensor.shape), values


def files_folder(folder: Path) -> Path:
    """Where the files next to the weights are: the folder itself, or that of a GGUF file."""
    return folder.parent if folder.is_file() else folder


def generation_ends(folder: Path) -> list[int]:
    """The end tokens in the folder's `generation_config.json`. Raises UserError unless it is a token or a list."""
    path = files_folder(folder) / GENERATION
    value = read_json(path).get("eos_token_id") if path.is_file() else None
    ends = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in ends):
        raise UserError(f"{path}: eos_token_id is {value!r:.100}; it must be a token id or a list of them")
    return ends
