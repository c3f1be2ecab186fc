"""Reads and writes a Hugging Face folder, one tensor at a time: there is never a second copy of the model in memory."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.errors import UserError
from lockstep.hub import local_folder
from lockstep.model.adapter_base import refuse_other_base
from lockstep.model.adapter_folder import SETTINGS, base_folder, is_adapter_folder, with_adapter
from lockstep.model.config import ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.model.device import device_of
from lockstep.model.dtypes import is_auto, resolve_dtype
from lockstep.model.families import from_hugging_face, is_copy, is_ignored, to_hugging_face
from lockstep.model.folder import (
    FLOATS,
    INDEX,
    SINGLE,
    folder_dtype,
    generation_ends,
    open_tensors,
    tensor_files,
)
from lockstep.model.initialize import initialize_some
from lockstep.model.json_file import read_json
from lockstep.model.more_tokens import OF_TOKENS, MoreTokens
from lockstep.model.mxfp4 import BLOCKS, SCALES, Mxfp4
from lockstep.model.other_names import more, refuse_names, refuse_quantized_tensors
from lockstep.model.protocols import TrainableModel
from lockstep.model.shard import local_part
from lockstep.model.stored import Stored, found_as, is_adapter, is_beside_base, is_score_head, stored_as
from lockstep.model.tied_head import has_own_head

QUANTIZED = ("U8",)
OF_FOLDER = ("bos_token_id", "eos_token_ids", "pad_token_id", "reduction_chunks")
"""Fields of ModelConfig that stay those of the folder that the model came from, whichever weights are loaded."""

log = logging.getLogger("lockstep")


def load_model(path: str | Path, dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu") -> Decoder:
    """A model folder, or a model on the hub, as a Decoder. dtype None, or `auto`, is the folder's own (`folder_dtype`).

    Raises UserError, naming the file and the key or tensor, for a folder that is incomplete or of another shape, and
    for a device that this machine lacks.
    """
    device = device_of(device)
    folder = local_folder(path)
    model, files = _model_and_files(folder, dtype)
    model.to_empty(device=device)
    copy_weights(check_tensors(model, folder, files))
    return model


def empty_model(folder: Path, dtype: str | torch.dtype | None = None) -> Decoder:
    """The folder's model on the meta device, without memory for its weights: only the files' headers are read.

    Raises UserError if `load_model` would. An adapter that records its base is compared with it, which reads the base's
    files.
    """
    model, files = _model_and_files(folder, dtype)
    check_tensors(model, folder, files)
    return model


def _model_and_files(folder: Path, dtype: str | torch.dtype | None) -> tuple[Decoder, dict[str, Path]]:
    """The folder's model without memory, and the file of each of its tensors."""
    config = read_config(folder)
    files = tensor_files(folder)
    refuse_few_bytes(folder, config)
    kind = folder_dtype(folder) if dtype is None or is_auto(dtype) else resolve_dtype(dtype)
    return Decoder(config, kind, "meta"), files


def refuse_few_bytes(folder: Path, config: ModelConfig) -> None:
    """Raises UserError if the folder's files are too small for all weights of `config`.

    Called before anything is built from a possibly damaged config.json: a layer or a shape of 10¹² would take hours.
    """
    files = tensor_files(folder)
    size = sum(path.stat().st_size for path in set(files.values()))
    in_a_byte = 2 if any(name.endswith(BLOCKS) for name in files) else 1
    if config.num_parameters > in_a_byte * size:
        refuse_quantized_tensors(folder, files)
        raise UserError(
            f"{folder}: config.json describes {config.num_parameters:,} weights, but the files have {size:,} bytes; "
            "download it again"
        )


def load_weights(model: TrainableModel, path: str | Path) -> None:
    """Replaces the model's weights by those of another folder, in place: every user of the model sees the new ones.

    All names, shapes, dtypes and files are checked before the first tensor changes. Raises UserError, with the weights
    unchanged, for a folder that is incomplete, damaged or of another model.
    """
    copy_weights(sources_of_weights(model, path))


class Added(NamedTuple):
    """What a model has in addition to the folder that it starts from."""

    fields: tuple[str, ...]
    """Of its ModelConfig."""
    names: Callable[[str], bool]
    """Whether a parameter is one of them."""


ADAPTER = Added(("lora",), is_adapter)
SCORE_HEAD = Added(("score_head", "tie_embeddings"), is_score_head)
BOTH = Added(ADAPTER.fields + SCORE_HEAD.fields, is_beside_base)
TOKENS = Added(("vocab_size",), lambda name: False)


class Source(NamedTuple):
    """Values of a parameter that this rank holds, and the place of a file's tensor that they come from."""

    values: Tensor
    place: tuple[slice, ...]
    tensor: Any

    def copy(self) -> None:
        """Reads the place, and nothing else of the tensor."""
        found = self.tensor[self.place]
        self.values.copy_(found.view(self.values.shape))


def begin_adapter(model: TrainableModel, path: str | Path, seed: int) -> None:
    """Fills a model that has an adapter with the weights of its base's folder, and the adapter with fresh ones.

    Raises UserError as `load_weights` does.
    """
    copy_weights(sources_of_weights(model, path, ADAPTER))
    initialize_some(model, seed, ADAPTER.names)


def begin_tokens(model: TrainableModel, path: str | Path, like: int) -> None:
    """Fills a model that has more tokens than its folder: embedding and head of each new one are those of token `like`.

    Raises UserError as `load_weights` does.
    """
    copy_weights(sources_of_weights(model, path, TOKENS, like))


def begin_score_head(model: TrainableModel, path: str | Path, seed: int) -> None:
    """Fills a model that has a score head with a language model's weights, and the head, and an adapter if it has one,
    with fresh ones.

    Raises UserError as `load_weights` does.
    """
    added = SCORE_HEAD if model.config.lora is None else BOTH
    copy_weights(sources_of_weights(model, path, added))
    initialize_some(model, seed, added.names)


def sources_of_weights(
    model: TrainableModel, path: str | Path, added: Added | None = None, like: int | None = None
) -> list[Source]:
    """What `load_weights` checks, and then copies; what is `added` is not looked for; `like` as in `begin_tokens`.
    Raises UserError."""
    folder = Path(path)
    try:
        config = read_config(folder)
        for field in dataclasses.fields(config):
            new, own = getattr(config, field.name), getattr(model.config, field.name)
            if new != own and field.name not in (*OF_FOLDER, *(added.fields if added else ())):
                raise UserError(
                    f"{folder}: {field.name} is {new}, but {own} in the loaded model; give a folder of that model"
                )
        return check_tensors(model, folder, tensor_files(folder), added, like)
    except UserError:
        raise
    except Exception as error:  # nothing has changed yet: whatever it is, the folder is the cause
        raise UserError(f"{folder}: cannot be read as a model folder ({type(error).__name__}: {error})") from error


def copy_weights(sources: list[Source]) -> None:
    """In place; of a sharded parameter only this rank's shard is read."""
    with torch.no_grad():
        for source in sources:
            source.copy()


def check_tensors(
    model: TrainableModel,
    folder: Path,
    files: dict[str, Path],
    added: Added | None = None,
    like: int | None = None,
) -> list[Source]:
    """Where each of the model's tensors comes from, file by file; `like` as in `begin_tokens`. Raises UserError if one
    is missing or wrong.

    Files are opened once, for the checks and the copies: replacing one in between has no effect.
    """
    if is_adapter_folder(folder):
        refuse_other_base(folder)
    parameters = [(n, p) for n, p in model.named_parameters() if not (added and added.names(n))]
    tied = model.config.tie_embeddings
    wanted = list(_wanted(parameters, files, tied))
    shapes = {name: shape for part, parameter in wanted for name, shape in part.tensors(parameter.shape).items()}
    # A model may have only some of the layers.
    everything = _wanted(Decoder(model.config, torch.float32, "meta").named_parameters(), files, tied)
    whole = {name for part, parameter in everything for name in part.tensors(parameter.shape)}
    others = [n for n in files if n not in whole and not is_copy(n, model.config)]
    unknown = [n for n in others if not is_ignored(n, model.config)]
    refuse_names(folder, [name for name in shapes if name not in files], unknown)
    if others and added is None:
        _name_unused(folder, f"{others[0]}{more(others)}")
    opened = {path: open_tensors(path) for path in sorted({files[name] for name in shapes})}
    quantized = {name for part, parameter in wanted if part.quantized for name in part.tensors(parameter.shape)}
    slices = {}
    for name, shape in shapes.items():
        path = files[name]
        stored = opened[path].get_slice(name)
        kinds = QUANTIZED if name in quantized else FLOATS
        if stored.get_dtype() not in kinds:
            raise UserError(f"{path}: tensor {name} is {stored.get_dtype()}; only {', '.join(kinds)} are read")
        if like is not None and name in OF_TOKENS and stored.get_shape()[0] < shape[0]:
            stored = MoreTokens(stored, shape[0], like)
        slices[name] = stored
        if stored.get_shape() != list(shape):
            raise UserError(
                f"{path}: tensor {name} has shape {stored.get_shape()}, but config.json requires {list(shape)}"
            )
    sources = []
    for part, parameter in sorted(wanted, key=lambda item: files[next(iter(item[0].tensors(item[1].shape)))]):
        local, place = local_part(parameter)
        if part.expert is not None:
            sources.append(Source(local[part.expert - place[0].start], part.place(place), slices[part.name]))
        elif part.quantized:
            sources += _dequantized(part, local, place, slices)
        else:
            sources.append(Source(part.of(local), part.place(place), slices[part.name]))
    return sources


@lru_cache(maxsize=64)
def _name_unused(folder: Path, names: str) -> None:
    """Once per process."""
    log.warning("%s: not used by this model: tensor %s", folder, names)


def _dequantized(part: Stored, local: Tensor, place: tuple[slice, ...], slices: dict[str, Any]) -> Iterator[Source]:
    """One expert after the other: what is read at once is in memory both in bfloat16 and as its bytes."""
    tensor = Mxfp4(part.name, slices[part.name + BLOCKS], slices[part.name + SCALES])
    for own, expert in enumerate(range(place[0].start, place[0].stop)):
        yield Source(part.of(local[own]), part.place((slice(expert, expert + 1), *place[1:])), tensor)


def _wanted(
    parameters: Iterable[tuple[str, Tensor]], files: Collection[str], tied: bool
) -> Iterator[tuple[Stored, Tensor]]:
    """For each parameter the tensors that it is read from; for experts only those of this rank."""
    for name, parameter in parameters:
        own = local_part(parameter)[1][:1]
        for part in found_as(name, parameter.shape, files, tied):
            if part.expert is None or own[0].start <= part.expert < own[0].stop:
                yield part, parameter


def save_model(model: Decoder, path: str | Path, max_shard_bytes: int = 5 * 10**9) -> None:
    """Writes `config.json` and safetensors, in shards if the model is larger than `max_shard_bytes`.

    Each file is written under a temporary name and renamed, `config.json` last: a folder with one is complete. Raises
    UserError for a model with an adapter.
    """
    if model.config.lora is not None:
        raise UserError(
            "the model has an adapter, which cannot be part of a Hugging Face folder; save it by itself with "
            "lockstep.model.save_adapter, and merge it with lockstep convert --merge"
        )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        part.name: part.of(parameter.detach())
        for name, parameter in model.named_parameters()
        for part in stored_as(name, parameter.shape)
    }
    shards = _shards(named, max_shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    (folder / "config.json").unlink(missing_ok=True)
    for old in [*folder.glob("model*.safetensors"), folder / INDEX]:
        if old.name not in names:
            old.unlink(missing_ok=True)
    for name, shard in zip(names, shards):
        partial = folder / (name + ".partial")
        save_file({n: t.contiguous() for n, t in shard.items()}, partial, metadata={"format": "pt"})
        partial.replace(folder / name)
    write_description(
        folder,
        model.config,
        model.dtype,
        {n: name for name, shard in zip(names, shards) for n in shard},
        sum(t.nbytes for t in named.values()),
    )


def write_description(
    folder: Path, config: ModelConfig, dtype: torch.dtype, files: dict[str, str], total_bytes: int
) -> None:
    """Writes `config.json` and, if the tensors are in several `files`, their index: everything but the tensors."""
    if len(set(files.values())) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": files})
    _write_json(folder / "config.json", to_hugging_face(config, str(dtype).removeprefix("torch.")))


def read_config(folder: Path) -> ModelConfig:
    """The folder's `config.json`, with end-of-text tokens also from `generation_config.json`, and an output head that
    is tied only if the files have no other. Raises UserError."""
    if is_adapter_folder(folder):
        return with_adapter(folder, read_config(base_folder(folder)))
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json; give a model folder in Hugging Face layout")
    if (folder / SETTINGS).is_file():
        raise UserError(
            f"{folder}: has both a model (config.json) and an adapter ({SETTINGS}), which transformers would apply to "
            "it; move the adapter's files to a folder of their own, or delete them"
        )
    config = from_hugging_face(read_json(path), str(path))
    ends = dict.fromkeys([*config.eos_token_ids, *generation_ends(folder)])
    tied = config.tie_embeddings and not has_own_head(folder)
    return dataclasses.replace(config, eos_token_ids=tuple(ends), tie_embeddings=tied)


def refuse_score_head(config: ModelConfig, name: str) -> None:
    """Raises UserError, naming the model, if it is a reward model, which does not predict a next token."""
    if config.score_head:
        raise UserError(
            f"{name}: is a reward model, which scores a text and predicts no next token; give a language model here, "
            "and the reward model as lockstep rl --reward-model"
        )


def _shards(tensors: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > max_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
    return shards


def _write_json(path: Path, values: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n")
    partial.replace(path)
