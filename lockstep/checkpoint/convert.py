"""Converts Hugging Face folders, checkpoints and Meta's folders to Hugging Face folders, one tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.manifest import MANIFEST, damage_of_model
from lockstep.checkpoint.safetensors_file import DTYPES, MAX_FILE_BYTES, bytes_of, file_name, header, split_files
from lockstep.config import PrecisionConfig
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
from lockstep.model.config_json import config_values, holds_model
from lockstep.model.folder import GENERATION, files_folder, generation_ends
from lockstep.model.json_file import read_json
from lockstep.model.layers import projections
from lockstep.model.stored import EMBEDDING, HEAD, hugging_face_name, is_adapter, is_float32
from lockstep.model.stored_tensor import StoredTensor
from lockstep.model.tensors import dequantized, names_in_wrapper, tensors_around
from lockstep.model.vision_wrapper import is_wrapper
from lockstep.model.write_compressed_tensors import Form, form_of, quantization_config, quantized_parts
from lockstep.precision import NONE

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "byte_tokenizer.json",
)  # fmt: skip
PROCESSOR_FILES = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json"
)  # fmt: skip
"""Of models with a vision tower."""


@dataclass
class Weights:
    """A model on disk: its config, and by Hugging Face name the shape of each tensor and a function that reads it."""

    config: ModelConfig
    dtype: torch.dtype
    tensors: dict[str, tuple[torch.Size, Callable[[], Tensor]]]
    forms: dict[str, Form] = field(default_factory=dict)
    """How those weights are stored that will be quantized."""
    wrapper: dict[str, Any] | None = None
    """`config.json` of the model around the language model."""
    around: dict[str, torch.dtype] = field(default_factory=dict)
    """The tensors of that model that are not the language model's, which keep their dtypes."""


def convert(
    source: str | Path,
    target: str | Path,
    dtype: str = "auto",
    max_file_bytes: int = MAX_FILE_BYTES,
    merge: bool = False,
    precision: PrecisionConfig | None = None,
) -> None:
    """Writes the model in `source` as a Hugging Face folder, in `dtype` (auto: unchanged), in files of limited size.

    `source` is a Hugging Face folder, which includes a run's checkpoint, a GGUF file, or one of Meta's folders with
    `params.json` and `consolidated.*.pth`. Of a model with a vision tower the target is one too: `dtype` is that of its
    language model, and the other tensors are unchanged, unless they are quantized. `merge`: it is an adapter, and the
    target gets the base's weights plus the adapter's updates, W + scaling · B A, computed in float32 and rounded once
    to `dtype`; so the merged model's log-probabilities equal those of base and adapter up to rounding, not bit for bit.
    `precision`: what the target computes in when it is opened; its `linear`, unless auto, is also what the linear
    layers are stored in, quantized from bfloat16. Only one tensor is in memory at a time. Raises UserError, naming file
    and tensor, for an incomplete source or a target that is not empty; the target is renamed to its final name when it
    is complete.
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
    home = base_folder(source)
    if not weights.config.score_head and holds_model(home) and is_wrapper(config_values(home)[0]):
        weights = _with_tower(home, weights)
    if precision is not None:
        if weights.wrapper is not None and precision.linear != "auto":
            raise UserError(
                f"{source}: has a vision tower, with which no quantized folder is written (--precision.linear); write "
                "the language model alone, with lockstep.save_model(lockstep.load_model(FOLDER), NEW), and convert that"
            )
        weights = _in_precision(weights, precision)
        if weights.forms and kind != torch.bfloat16:
            raise UserError(
                f"{source}: would be written from weights in {name_of(kind)}, but only those in bfloat16 have the same "
                "codes when they are read and quantized again; give --dtype bfloat16"
            )
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
        if weights.wrapper is not None:
            for path in (base_folder(source) / name for name in PROCESSOR_FILES):
                if path.is_file():
                    shutil.copyfile(path, unfinished / path.name)
        settings = (files_folder(folder) / GENERATION for folder in (source, base_folder(source)))
        if generation := next(filter(Path.is_file, settings), None):
            shutil.copyfile(generation, unfinished / GENERATION)
        config = _with_ends(unfinished, weights.config)
        files, total = _write(unfinished, weights, kind, max_file_bytes)
        write_description(unfinished, config, kind, files, total, _settings(weights), weights.wrapper)
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
        read = read_as(name, parameter.shape, stored, config)
        for part in stored_as(name, parameter.shape, config):
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
    """The base's weights with the adapter's updates added. A tied head with an update is no longer the embedding."""
    lora, tied = weights.config.lora, weights.config.tie_embeddings
    assert lora is not None
    tensors = {name: entry for name, entry in weights.tensors.items() if not is_adapter(name)}
    for module in lora.modules:
        name = hugging_face_name(f"{module}.weight", weights.config)
        shape, base = tensors[EMBEDDING if tied and name == HEAD else name]
        sides = (hugging_face_name(f"{module}.lora_{side}.weight", weights.config) for side in "AB")
        a, b = (weights.tensors[side][1] for side in sides)
        tensors[name] = shape, partial(_updated, base, a, b, lora.scaling)
    config = replace(weights.config, lora=None, tie_embeddings=tied and HEAD not in tensors)
    return Weights(config, weights.dtype, tensors)


def _updated(base: Callable[[], Tensor], a: Callable[[], Tensor], b: Callable[[], Tensor], scaling: float) -> Tensor:
    return base().float() + scaling * (b().float() @ a().float())


def _with_tower(folder: Path, weights: Weights) -> Weights:
    """The language model's weights under their names in the folder with a vision tower, and all other tensors there."""
    name_in = names_in_wrapper(folder)
    tensors = {name_in(name): entry for name, entry in weights.tensors.items()}
    dtypes, around = {name: kind for kind, name in DTYPES.items()}, {}
    for name, tensor in dequantized(folder, tensors_around(folder)).items():
        if tensor.get_dtype() not in dtypes:
            raise UserError(f"{tensor.file}: tensor {name} is {tensor.get_dtype()}, which is not written")
        around[name] = dtypes[tensor.get_dtype()]
        shape = torch.Size(tensor.get_shape())
        tensors[name] = shape, partial(_read, tensor, tuple(slice(0, size) for size in shape), shape)
    return replace(weights, tensors=tensors, wrapper=config_values(folder)[0], around=around)


def _check(source: Path, weights: Weights) -> None:
    """Raises UserError for a model whose tensors do not fit its shape."""
    model = Decoder(weights.config, torch.float32, "meta")
    wanted = {
        part.name: torch.Size(part.shape_for(parameter.shape))
        for name, parameter in model.named_parameters()
        for part in stored_as(name, parameter.shape, weights.config)
    }
    for name, shape in wanted.items():
        if name not in weights.tensors:
            raise UserError(f"{source}: tensor {name} is missing; the download may be incomplete")
        if weights.tensors[name][0] != shape:
            actual = list(weights.tensors[name][0])
            raise UserError(f"{source}: tensor {name} has shape {actual}, but its configuration requires {list(shape)}")
    if unknown := [name for name in weights.tensors if name not in wanted]:
        raise UserError(f"{source}: tensor {unknown[0]} is not part of this model; check its configuration")


def _in_precision(weights: Weights, precision: PrecisionConfig) -> Weights:
    """With the form of each weight that the precision does not keep. Raises UserError for one that it cannot have."""
    config = replace(weights.config, precision=precision.of_model(weights.config.precision, compared=False))
    if precision.linear == "auto":
        return replace(weights, config=config)
    model = Decoder(config, torch.float32, "meta")
    formats = {hugging_face_name(f"{name}.weight", config): layer.precision for name, layer in projections(model)}
    formats |= {HEAD: model.head_format} if HEAD in weights.tensors else {}  # else it is the embedding, which stays
    forms = {name: form_of(format, config.family) for name, format in formats.items() if format != NONE}
    return replace(weights, config=config, forms=forms)


def _settings(weights: Weights) -> dict[str, Any] | None:
    """The `quantization_config` of the folder."""
    if not weights.forms:
        return None
    form = next(iter(weights.forms.values()))
    return quantization_config(form, {name: shape for name, (shape, _) in weights.tensors.items()}, weights.forms)


def _parts(weights: Weights, name: str, values: Tensor) -> dict[str, Tensor]:
    """The tensors as which a weight is stored."""
    return quantized_parts(values, weights.forms[name], name) if name in weights.forms else {name: values}


def _write(folder: Path, weights: Weights, dtype: torch.dtype, max_file_bytes: int) -> tuple[dict[str, str], int]:
    """Each tensor's file, and the size of all tensors in bytes."""
    dtypes = {name: torch.float32 if is_float32(name) else dtype for name in weights.tensors} | weights.around
    parts = {
        name: _parts(weights, name, torch.empty(shape, dtype=dtypes[name], device="meta"))
        for name, (shape, _) in weights.tensors.items()
    }
    sizes = {name: sum(part.nbytes for part in of_weight.values()) for name, of_weight in parts.items()}
    files = split_files(sizes, max_file_bytes)
    placed = {}
    for index, names in enumerate(files):
        file = file_name("model", index, len(files))
        stored = [part for name in names for part in parts[name].items()]
        stored.sort(key=lambda part: -part[1].dtype.itemsize)  # so that every tensor is aligned
        head, begins = header({part: (values.dtype, values.shape) for part, values in stored})
        with (folder / file).open("wb") as out:
            out.write(head)
            for name in names:
                values = weights.tensors[name][1]().to(dtypes[name])
                for part, numbers in _parts(weights, name, values).items():
                    out.seek(begins[part])
                    out.write(bytes_of(numbers))
                    placed[part] = file
    return placed, sum(sizes.values())
