"""The tensors of a model folder by name, whatever form they are stored in: opened once, and read in slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.model.adapter_folder import base_folder
from lockstep.model.folder import open_tensors, tensor_files
from lockstep.model.json_file import read_json
from lockstep.model.quantized import dequantize_of
from lockstep.model.scaled import StoredTensor


class FileTensor:
    """A tensor as it is in a safetensors file."""

    def __init__(self, file: Path, stored: Any):
        self.file, self._stored = file, stored

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stored.get_shape()
        return shape

    def get_dtype(self) -> str:
        return str(self._stored.get_dtype())

    def __getitem__(self, place: Any) -> Tensor:
        values: Tensor = self._stored[place]
        return values


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder, or of an adapter and its base, by its name; of quantized folders those of the
    unquantized model.

    Files are opened once: replacing one later has no effect. Raises UserError, naming file and tensor, for a file that
    cannot be read, and for parts of a quantized weight that do not fit.
    """
    files = tensor_files(folder)
    opened = {path: open_tensors(path) for path in sorted(set(files.values()))}
    tensors: dict[str, StoredTensor] = {n: FileTensor(path, opened[path].get_slice(n)) for n, path in files.items()}
    config = base_folder(folder) / "config.json"
    return dequantize_of(read_json(config), str(config))(tensors)
