"""The tensors of a model folder by name, whatever form they are stored in: opened once, and read in slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.model.adapter_folder import adapter_files, base_folder, is_adapter_folder
from lockstep.model.config_json import config_values, holds_model
from lockstep.model.folder import open_tensors, tensor_files
from lockstep.model.gguf import gguf_file, gguf_tensors
from lockstep.model.quantized import dequantize_of
from lockstep.model.stored import HEAD, PEFT_ROOT, is_of_language_model
from lockstep.model.stored_tensor import FileTensor, StoredTensor
from lockstep.model.vision_wrapper import is_wrapper, text_settings

ROOT = "model."


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder, or of an adapter and its base, by its name; of a quantized folder or a GGUF file, those
    of the unquantized model, and of a model with a vision tower, those of the language model.

    Files are opened once: replacing one later has no effect. Raises UserError, naming file and tensor, for a file that
    cannot be read, and for parts of a quantized weight that do not fit.
    """
    if is_adapter_folder(folder):
        adapter = adapter_tensors(folder)
        # Its head replaces the base's.
        base = stored_tensors(base_folder(folder)).items()
        return {name: tensor for name, tensor in base if f"{PEFT_ROOT}{name}" not in adapter} | adapter
    if (file := gguf_file(folder)) is not None:
        return gguf_tensors(file)
    wanted = is_of_language_model if is_wrapper(config_values(folder)[0]) else None
    return dequantized(folder, _in_files(tensor_files(folder), wanted))


def adapter_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of an adapter's folder by its name, without those of its base. Raises UserError."""
    return _in_files(adapter_files(folder))


def dequantized(folder: Path, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """These tensors of the folder, with weights in place of the parts as which they are stored. Raises UserError."""
    values, where = config_values(folder)
    return dequantize_of(text_settings(values, where)[0], where)(stored)


def tensors_around(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model with a vision tower that are not the language model's, as they are stored; of other models
    none. Of an adapter, its base's."""
    home = base_folder(folder)
    if not holds_model(home) or not is_wrapper(config_values(home)[0]):
        return {}
    return _in_files(tensor_files(home), lambda name: not is_of_language_model(name))


def names_in_wrapper(folder: Path) -> Callable[[str], str]:
    """From the name of a tensor of the language model to that in the folder's files, with a vision tower."""
    files = tensor_files(folder)
    opened = {path: open_tensors(path) for path in set(files.values())}
    stored = {name: opened[path].stored_name(name) for name, path in files.items()}
    inner, name = next((n, s) for n, s in stored.items() if n.startswith(ROOT) and is_of_language_model(s))
    prefix = name.removesuffix(inner.removeprefix(ROOT))
    head = stored.get(HEAD, f"language_model.{HEAD}" if prefix == f"language_model.{ROOT}" else HEAD)
    return lambda name: head if name == HEAD else prefix + name.removeprefix(ROOT)


def _in_files(files: dict[str, Path], wanted: Callable[[str], bool] | None = None) -> dict[str, StoredTensor]:
    """The tensors, or those whose names in the files are `wanted`."""
    opened = {path: open_tensors(path) for path in sorted(set(files.values()))}
    return {
        name: FileTensor(path, opened[path].get_slice(name))
        for name, path in files.items()
        if wanted is None or wanted(opened[path].stored_name(name))
    }
