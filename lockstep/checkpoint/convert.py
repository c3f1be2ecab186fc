"""Converts Hugging Face folders, checkpoints and Meta's folders to Hugging Face folders, one tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint.manifest import MANIFEST, damage_of_model
from lockstep.checkpoint.safetensors_file import MAX_FILE_BYTES, bytes_of, file_name, header, split_files
from lockstep.data import load_tokenizer, with_ends
from lockstep.data.chat import load_chat_template
from lockstep.data.tokenizer import tokenizer_folder
from lockstep.errors import UserError
from lockstep.hub import is_local
from lockstep.model import (
    Decoder,
    ModelConfig,
    base_folder,
    check_tensors,
    is_adapter_folder,
    is_auto,
    name_of,
    read_as,
    read_config,
    refuse_few_bytes,
    resolve_dtype,
    stored_as,
    stored_dtype,
    stored_tensors,
    write_description,
)
from lockstep.model.config_json import holds_model
from lockstep.model.folder import GENERATION, files_folder, generation_ends
from lockstep.model.json_file import read_json
from lockstep.model.stored import hugging_face_name, is_adapter, is_float32
from lockstep.model.stored_tensor import StoredTensor

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "byte_tokenizer.json",
)  # fmt: skip


@dataclass
class Weights:
    """A model on disk: its config, and by Hugging Face name the shape of each tensor and a function that reads it."""

    config: ModelConfig
    dtype: torch.dtype
    tensors: dict[str, tuple[torch.Size, Callable[[], Tensor]]]


def convert(
    source: str | Path,
    target: str | Path,
    dtype: str = "auto",
    max_file_bytes: int = MAX_FILE_BYTES,
    merge: bool = False,
) -> None:
    """Writes the model in `source` as a Hugging Face folder, in `dtype` (auto: unchanged), in files of limited size.

    `source` is a Hugging Face folder, which includes a run's checkpoint, a GGUF file, or one of Meta's folders with
    `params.json` and `consolidated.*.pth`. `merge`: it is an adapter, and the target gets the base's weights plus the
    adapter's updates, W + scaling · B A, computed in float32 and rounded once to `dtype`; so the merged model's
    log-probabilities equal those of base and adapter up to rounding, not bit for bit. Only one tensor is in memory at a
    time. Raises UserError, naming file and tensor, for an incomplete source or a target that is not empty; the target
    is renamed to its final name when it is complete.
    """
    source, target = Path(source), Path(target)
    if not is_local(source):
        raise UserError(f"{source}: no such folder; give a model's folder or a run's")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: is not an empty folder; give another one to write")
    # A checkpoint of a run, of which only the model is read.
    ours = (source / "state.json").is_file() or (source / MANIFEST).is_file()
    if is_adapter_folder(source) != merge:
        raise UserError(
            f"{source}: is not an adapter, so there is nothing to merge; remove --merge"
            if merge
            else f"{source}: is an adapter; give --merge to write its base with the adapter merged in"
        )
    if ours and (problem := damage_of_model(source)):
        raise UserError(f"{source}: is damaged: {problem}; use an older checkpoint of the run")
    weights = _merged(_hugging_face(source)) if merge else _open(source)
    kind = weights.dtype if is_auto(dtype) else resolve_dtype(dtype)
    if kind not in (torch.bfloat16, torch.float32):
        raise UserError(f"{source}: its dtype is {name_of(kind)}; give --dtype bfloat16 or float32")
    try:
        _write_folder(target, source, weights, kind, max_file_bytes)
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written ({error.strerror}); free space there, or give another folder"
        ) from error


def _write_folder(target: Path, source: Path, weights: Weights, kind: torch.dtype, max_file_bytes: int) -> None:
    """Writes the whole folder under a unique name, then renames it."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.partial")
    unfinished.mkdir(parents=True)
    try:
        # One folder for all files: the base's template does not fit the adapter's tokenizer.
        home = tokenizer_folder(source)
        for path in (path for pattern in TOKENIZER_FILES for path in home.glob(pattern)):
            copy = unfinished / path.relative_to(home)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        settings = (files_folder(folder) / GENERATION for folder in (source, base_folder(source)))
        if generation := next(filter(Path.is_file, settings), None):
            shutil.copyfile(generation, unfinished / GENERATION)
        config = _with_ends(unfinished, weights.config)
        files = _write(unfinished, weights, kind, max_file_bytes)
        write_description(unfinished, config, kind, files, config.num_parameters * kind.itemsize)
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _with_ends(folder: Path, config: ModelConfig) -> ModelConfig:
    """The config with the end tokens of the tokenizer's files in `folder`, which are also written to
    `generation_config.json`, the only place where other programs look."""
    if (folder / "tokenizer.json").is_file():
        config = with_ends(config, load_tokenizer(folder), load_chat_template(folder))
    path = folder / GENERATION
    if path.is_file() and set(config.eos_token_ids) != set(generation_ends(folder)):
        values = read_json(path) | {"eos_token_id": list(config.eos_token_ids)}
        path.write_text(json.dumps(values, indent=2) + "\n")
    return config


def _open(source: Path) -> Weights:
    if holds_model(source):
        return _hugging_face(source)
    if (source / "params.json").is_file():
        from lockstep.checkpoint.meta_llama import open_meta_llama

        weights = Weights(*open_meta_llama(source))
        _check(source, weights)
        return weights
    raise UserError(
        f"{source}: neither config.json (Hugging Face) nor params.json (Meta) nor a GGUF file; give a model's folder"
    )


def _hugging_face(source: Path) -> Weights:
    config = read_config(source)
    refuse_few_bytes(source, config)
    model, stored = Decoder(config, torch.float32, "meta"), stored_tensors(source)
    check_tensors(model, source, stored)
    tensors: dict[str, tuple[torch.Size, Callable[[], Tensor]]] = {}
    for name, parameter in model.named_parameters():
        read = read_as(name, parameter.shape, stored, config.tie_embeddings)
        for part in stored_as(name, parameter.shape):
            place = tuple(slice(0, size) for size in parameter.shape)
            if part.expert is not None:  # which the files may have stacked
                place = slice(part.expert, part.expert + 1), *place[1:]
            origin = next(each for each in read if each.expert in (None, part.expert))
            shape = torch.Size(part.shape_for(parameter.shape))
            tensors[part.name] = shape, partial(_read, stored[origin.name], origin.place(place), shape)
    return Weights(config, stored_dtype(source)[0], tensors)


def _read(tensor: StoredTensor, place: tuple[slice, ...], shape: torch.Size) -> Tensor:
    return tensor[place].reshape(shape)


def _merged(weights: Weights) -> Weights:
    """The base's weights with the adapter's updates added."""
    lora = weights.config.lora
    assert lora is not None
    tensors = {name: entry for name, entry in weights.tensors.items() if not is_adapter(name)}
    for module in lora.modules:
        name = hugging_face_name(f"{module}.weight")
        shape, base = tensors[name]
        a, b = (weights.tensors[hugging_face_name(f"{module}.lora_{side}.weight")][1] for side in "AB")
        tensors[name] = shape, partial(_updated, base, a, b, lora.scaling)
    return Weights(replace(weights.config, lora=None), weights.dtype, tensors)


def _updated(base: Callable[[], Tensor], a: Callable[[], Tensor], b: Callable[[], Tensor], scaling: float) -> Tensor:
    return base().float() + scaling * (b().float() @ a().float())


def _check(source: Path, weights: Weights) -> None:
    """Raises UserError for a model whose tensors do not fit its shape."""
    model = Decoder(weights.config, torch.float32, "meta")
    wanted = {
        part.name: torch.Size(part.shape_for(parameter.shape))
        for name, parameter in model.named_parameters()
        for part in stored_as(name, parameter.shape)
    }
    for name, shape in wanted.items():
        if name not in weights.tensors:
            raise UserError(f"{source}: tensor {name} is missing; the download may be incomplete")
        if weights.tensors[name][0] != shape:
            actual = list(weights.tensors[name][0])
            raise UserError(f"{source}: tensor {name} has shape {actual}, but its configuration requires {list(shape)}")
    if unknown := [name for name in weights.tensors if name not in wanted]:
        raise UserError(f"{source}: tensor {unknown[0]} is not part of this model; check its configuration")


def _write(folder: Path, weights: Weights, dtype: torch.dtype, max_file_bytes: int) -> dict[str, str]:
    shapes = {name: shape for name, (shape, _) in weights.tensors.items()}
    dtypes = {name: torch.float32 if is_float32(name) else dtype for name in shapes}
    files = split_files({n: shape.numel() * dtypes[n].itemsize for n, shape in shapes.items()}, max_file_bytes)
    placed = {}
    for index, names in enumerate(files):
        file = file_name("model", index, len(files))
        with (folder / file).open("wb") as out:
            out.write(header({n: (dtypes[n], shapes[n]) for n in names})[0])
            for name in names:
                out.write(bytes_of(weights.tensors[name][1]().to(dtypes[name])))
                placed[name] = file
    return placed
