"""The tensors of a model folder by name, whatever form they are stored in: opened once, and read in slices."""

from __future__ import annotations

from pathlib import Path

from lockstep.model.adapter_folder import adapter_files, base_folder, is_adapter_folder
from lockstep.model.config_json import config_values
from lockstep.model.folder import open_tensors, tensor_files
from lockstep.model.gguf import gguf_file, gguf_tensors
from lockstep.model.quantized import dequantize_of
from lockstep.model.stored import PEFT_ROOT
from lockstep.model.stored_tensor import FileTensor, StoredTensor


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder, or of an adapter and its base, by its name; of a quantized folder or a GGUF file, those
    of the unquantized model.

    Files are opened once: replacing one later has no effect. Raises UserError, naming file and tensor, for a file that
    cannot be read, and for parts of a quantized weight that do not fit.
    """
    if is_adapter_folder(folder):
        adapter = _in_files(adapter_files(folder))
        # Its head replaces the base's.
        base = stored_tensors(base_folder(folder)).items()
        return {name: tensor for name, tensor in base if f"{PEFT_ROOT}{name}" not in adapter} | adapter
    if (file := gguf_file(folder)) is not None:
        return gguf_tensors(file)
    return dequantize_of(*config_values(folder))(_in_files(tensor_files(folder)))


def _in_files(files: dict[str, Path]) -> dict[str, StoredTensor]:
    opened = {path: open_tensors(path) for path in sorted(set(files.values()))}
    return {name: FileTensor(path, opened[path].get_slice(name)) for name, path in files.items()}
