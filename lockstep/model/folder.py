"""A model folder: the file of each tensor, the dtype to compute in, and its end tokens."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.errors import UserError
from lockstep.model.adapter_folder import adapter_files, base_folder, is_adapter_folder
from lockstep.model.dtypes import DTYPES
from lockstep.model.json_file import read_json
from lockstep.model.mxfp4 import BLOCKS, SCALES
from lockstep.model.stored import PEFT_ROOT, in_language_model, is_adapter, is_float32

GENERATION = "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""The supported floating-point types of safetensors."""


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor in the folder, by its name. Raises UserError for a file outside the folder.

    As in transformers, a single file takes precedence over an index, and an index only lists the files: all tensors in
    them are read, whether the index lists them or not.
    """
    if is_adapter_folder(folder):
        adapter = adapter_files(folder)
        # Its head replaces the base's.
        return {
            n: f for n, f in tensor_files(base_folder(folder)).items() if f"{PEFT_ROOT}{n}" not in adapter
        } | adapter
    listed = read_json(folder / INDEX).get("weight_map", {}) if (folder / INDEX).is_file() else {}
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise UserError(f"{folder / INDEX}: weight_map is not a table of file names; download it again")
    if (folder / SINGLE).is_file():
        listed = {}
    elif not (folder / INDEX).is_file():
        raise UserError(f"{folder}: neither {SINGLE} nor {INDEX}; only safetensors are read, never pickles")
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
    """A safetensors file whose tensors are named by `in_language_model`, unless that would give two the same name."""

    def __init__(self, path: Path):
        self._file = safe_open(path, framework="pt")
        stored = dict.fromkeys(self._file.keys())
        self._names = {name if (full := in_language_model(name)) in stored else full: name for name in stored}

    def keys(self) -> list[str]:
        return list(self._names)

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


def folder_dtype(folder: Path) -> torch.dtype:
    """The dtype to compute a folder's model in. Raises UserError if it is neither bfloat16 nor float32."""
    dtype, origin = stored_dtype(folder)
    if dtype not in DTYPES.values():
        name = str(dtype).removeprefix("torch.")
        raise UserError(f"{origin} {name}; give dtype bfloat16 or float32 to convert the weights")
    return dtype


def stored_dtype(folder: Path) -> tuple[torch.dtype, str]:
    """The dtype in the folder's configuration or, if there is none, that of most of the tensors' bytes; and its origin,
    as the beginning of a sentence. Raises UserError for a configuration whose dtype torch does not have."""
    path = base_folder(folder) / "config.json"
    values = read_json(path)
    text = values.get("text_config")
    for part in (values, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if (name := part.get(key)) is not None:
                dtype = getattr(torch, str(name).removeprefix("torch."), None)
                if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
                    raise UserError(f"{path}: {key} is {name!r:.100}; it must be a dtype, such as bfloat16")
                return dtype, f"{path}: {key} is"
    return _commonest(folder), f"{folder}: most of its tensors are"


def _commonest(folder: Path) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    by_file: dict[Path, list[str]] = {}
    for name, path in tensor_files(folder).items():
        # Quantized tensors are read as bfloat16, and a router's bias is float32 in any folder.
        if not name.endswith((BLOCKS, SCALES)) and not is_float32(name) and not is_adapter(name):
            by_file.setdefault(path, []).append(name)
    for path, names in by_file.items():
        opened = open_tensors(path)
        for entry in map(opened.get_slice, names):
            if (dtype := FLOATS.get(entry.get_dtype())) is not None:
                sizes[dtype] += dtype.itemsize * math.prod(entry.get_shape())
    return max(sizes, key=lambda dtype: (sizes[dtype], dtype.itemsize), default=torch.bfloat16)


def generation_ends(folder: Path) -> list[int]:
    """The end tokens in the folder's `generation_config.json`. Raises UserError unless it is a token or a list."""
    path = folder / GENERATION
    value = read_json(path).get("eos_token_id") if path.is_file() else None
    ends = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in ends):
        raise UserError(f"{path}: eos_token_id is {value!r:.100}; it must be a token id or a list of them")
    return ends
