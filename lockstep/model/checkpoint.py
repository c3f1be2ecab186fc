"""Reads and writes a Hugging Face folder, one tensor at a time, without a second copy of the model in memory."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.errors import UserError
from lockstep.hub import local_folder, named_path
from lockstep.model.adapter_folder import SETTINGS, base_folder, is_adapter_folder, with_adapter
from lockstep.model.config import ModelConfig
from lockstep.model.config_json import config_values, positions_limit
from lockstep.model.copied_head import refuse_other_head
from lockstep.model.decoder import Decoder
from lockstep.model.device import checked_device
from lockstep.model.dtypes import is_auto, name_of, resolve_dtype
from lockstep.model.families import from_hugging_face, is_copy, is_ignored, to_hugging_face
from lockstep.model.families.own import know_family
from lockstep.model.folder import (
    FLOATS,
    INDEX,
    SINGLE,
    generation_ends,
    refuse_other_base,
    tensor_files,
)
from lockstep.model.folder_dtype import folder_dtype
from lockstep.model.initialize import initialize_some
from lockstep.model.more_tokens import OF_TOKENS, MoreTokens
from lockstep.model.protocols import TrainableModel
from lockstep.model.shard import local_part
from lockstep.model.stored import Stored, is_adapter, is_saved_with_adapter, is_score_head, read_as, stored_as
from lockstep.model.stored_tensor import Ones, StoredTensor
from lockstep.model.tensor_names import more, refuse_names, refuse_quantized_tensors
from lockstep.model.tensors import stored_tensors, tensors_around
from lockstep.model.tied_head import has_untied_head
from lockstep.model.vision_wrapper import with_text_settings

MOST_IN_A_BYTE = 2
"""Weights in a byte of a file: quantized ones have at least 4 bits."""
ELEMENTS = 2**24
"""Elements that are read at a time: quantized weights are in float32 until they are copied."""
FOLDER_FIELDS = ("bos_token_id", "eos_token_ids", "pad_token_id", "reduction_chunks", "precision")
"""Fields of ModelConfig that `load_weights` does not change: they stay those of the model's first folder."""

log = logging.getLogger("lockstep")


def load_model(path: str | Path, dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu") -> Decoder:
    """A model folder, or a model on the hub, as a Decoder. dtype None or `auto` is the folder's (`folder_dtype`).

    Raises UserError, naming the file and the key or tensor, for a folder that is incomplete or of another shape, and
    for a device that this machine lacks.
    """
    device = checked_device(device)
    know_family(path)
    folder = local_folder(path)
    model = _model_of(folder, dtype)
    model.to_empty(device=device)
    copy_weights(check_tensors(model, folder, stored_tensors(folder)))
    return model


def empty_model(folder: Path, dtype: str | torch.dtype | None = None) -> Decoder:
    """The folder's model on the meta device, without memory for its weights: only the files' headers are read.

    Raises UserError if `load_model` would. An adapter with a recorded digest is compared with its base, whose files are
    read for it.
    """
    model = _model_of(folder, dtype)
    check_tensors(model, folder, stored_tensors(folder))
    return model


def _model_of(folder: Path, dtype: str | torch.dtype | None) -> Decoder:
    """The folder's model on the meta device."""
    config = read_config(folder)
    refuse_few_bytes(folder, config)
    kind = folder_dtype(folder) if dtype is None or is_auto(dtype) else resolve_dtype(dtype)
    return Decoder(config, kind, "meta")


def refuse_few_bytes(folder: Path, config: ModelConfig) -> None:
    """Raises UserError if the folder's files are too small for all weights of `config`.

    Called before anything is built from a possibly damaged config.json: 10¹² layers, or such a size, would take hours.
    """
    tensors = stored_tensors(folder)
    size = sum(path.stat().st_size for path in {tensor.file for tensor in tensors.values()})
    if config.num_parameters > MOST_IN_A_BYTE * size:
        refuse_quantized_tensors(folder, tensors)
        raise UserError(
            f"{folder}: the configuration describes {config.num_parameters:,} weights, but the files have {size:,} "
            "bytes; download it again"
        )


def load_weights(model: TrainableModel, path: str | Path) -> None:
    """Replaces the model's weights with those of another folder, in place: all users of the model see the new ones.

    All names, shapes, dtypes and files are checked before the first tensor changes. Raises UserError, with the weights
    unchanged, for a folder that is incomplete, damaged or of another model.
    """
    copy_weights(sources_of_weights(model, path))


class Added(NamedTuple):
    """What a model has in addition to the folder from which it is initialized."""

    fields: tuple[str, ...]
    """Fields of its ModelConfig that differ from the folder's."""
    names: Callable[[str], bool]
    """Whether the parameter of this name is an added one."""


ADAPTER = Added(("lora",), is_adapter)
SCORE_HEAD = Added(("score_head", "tie_embeddings"), is_score_head)
BOTH = Added(ADAPTER.fields + SCORE_HEAD.fields, is_saved_with_adapter)
TOKENS = Added(("vocab_size",), lambda name: False)


class Source(NamedTuple):
    """This rank's values of a parameter, and the place in a file's tensor from which they are read."""

    values: Tensor
    place: tuple[slice, ...]
    tensor: StoredTensor

    def copy(self) -> None:
        """Reads that place of the tensor, and nothing else, some rows at a time."""
        start, rest = self.place[0].start, self.place[1:]
        rows = max(1, ELEMENTS // max(1, self.values[0].numel())) if len(self.values) else 1
        for first in range(0, len(self.values), rows):
            values = self.values[first : first + rows]
            values.copy_(self.tensor[(slice(start + first, start + first + len(values)), *rest)])


def begin_adapter(model: TrainableModel, path: str | Path, seed: int) -> None:
    """Loads the base's weights into a model with an adapter, and initializes the adapter.

    Raises UserError as `load_weights` does.
    """
    copy_weights(sources_of_weights(model, path, ADAPTER))
    initialize_some(model, seed, ADAPTER.names)


def begin_tokens(model: TrainableModel, path: str | Path, like: int) -> None:
    """Loads a folder with fewer tokens than the model: new tokens get the embedding and head of token `like`.

    Raises UserError as `load_weights` does.
    """
    copy_weights(sources_of_weights(model, path, TOKENS, like))


def begin_score_head(model: TrainableModel, path: str | Path, seed: int) -> None:
    """Loads a language model's weights into a model with a score head, and initializes the head, and its adapter if it
    has one.

    Raises UserError as `load_weights` does.
    """
    added = SCORE_HEAD if model.config.lora is None else BOTH
    copy_weights(sources_of_weights(model, path, added))
    initialize_some(model, seed, added.names)


def sources_of_weights(
    model: TrainableModel, path: str | Path, added: Added | None = None, like: int | None = None
) -> list[Source]:
    """The sources that `load_weights` copies, checked. Parameters that are `added` are skipped; `like` as in
    `begin_tokens`. Raises UserError."""
    folder = named_path(path)
    try:
        config = read_config(folder)
        for field in dataclasses.fields(config):
            new, current = getattr(config, field.name), getattr(model.config, field.name)
            if new != current and field.name not in (*FOLDER_FIELDS, *(added.fields if added else ())):
                raise UserError(
                    f"{folder}: {field.name} is {new}, but {current} in the loaded model; give a folder of that model"
                )
        return check_tensors(model, folder, stored_tensors(folder), added, like)
    except UserError:
        raise
    except Exception as error:  # no weight has changed yet, and any error is due to the folder
        raise UserError(f"{folder}: cannot be read as a model folder ({type(error).__name__}: {error})") from error


def copy_weights(sources: list[Source]) -> None:
    """Copies in place; only this rank's shard of a sharded parameter is read."""
    with torch.no_grad():
        for source in sources:
            source.copy()


def check_tensors(
    model: TrainableModel,
    folder: Path,
    stored: dict[str, StoredTensor],
    added: Added | None = None,
    like: int | None = None,
) -> list[Source]:
    """The source of each of the model's tensors in the `stored_tensors` of the folder, file by file; `like` as in
    `begin_tokens`. Raises UserError if one is missing or wrong.
    """
    if is_adapter_folder(folder):
        refuse_other_base(folder)
        refuse_other_head(folder, base_folder(folder))
    parameters = [(n, p) for n, p in model.named_parameters() if not (added and added.names(n))]
    wanted = list(_wanted(parameters, stored, model.config))
    # The model may be a pipeline stage, with some of the layers.
    everything = _wanted(Decoder(model.config, torch.float32, "meta").named_parameters(), stored, model.config)
    whole = {part.name for part, _ in everything}
    others = [n for n in stored if n not in whole and not is_copy(n, model.config)]
    unknown = [n for n in others if not is_ignored(n, model.config)]
    refuse_names(folder, list(dict.fromkeys(part.name for part, _ in wanted if part.name not in stored)), unknown)
    unused = [*(others if added is None else ()), *tensors_around(folder)]
    if unused:
        _name_unused(folder, f"{unused[0]}{more(unused)}")
    nowhere = [p for name, p in parameters if not stored_as(name, p.shape, model.config)]
    sources = [Source(*local_part(parameter), Ones(parameter.shape)) for parameter in nowhere]
    for part, parameter in sorted(wanted, key=lambda item: stored[item[0].name].file):
        tensor = checked_tensor(part.name, stored[part.name], part.shape_for(parameter.shape), like)
        local, place = local_part(parameter)
        values = part.of(local) if part.expert is None else local[part.expert - place[0].start]
        sources.append(Source(values, part.place(place), tensor))
    return sources


def checked_tensor(name: str, tensor: StoredTensor, shape: tuple[int, ...], like: int | None) -> StoredTensor:
    """The tensor, extended to more tokens `like` one of them. Raises UserError for another type or shape."""
    if tensor.get_dtype() not in FLOATS:
        raise UserError(f"{tensor.file}: tensor {name} is {tensor.get_dtype()}; only {', '.join(FLOATS)} are read")
    if like is not None and name in OF_TOKENS and tensor.get_shape()[0] < shape[0]:
        tensor = MoreTokens(tensor, shape[0], like)
    if tensor.get_shape() != list(shape):
        raise UserError(
            f"{tensor.file}: tensor {name} has shape {tensor.get_shape()}, but the configuration requires {list(shape)}"
        )
    return tensor


@lru_cache(maxsize=64)
def _name_unused(folder: Path, names: str) -> None:
    """Warns once per process."""
    log.warning("%s: not used by this model: tensor %s", folder, names)


def _wanted(
    parameters: Iterable[tuple[str, Tensor]], stored: Collection[str], config: ModelConfig
) -> Iterator[tuple[Stored, Tensor]]:
    """For each parameter, the tensors from which it is read; of experts, only those of this rank."""
    for name, parameter in parameters:
        local = local_part(parameter)[1][:1]
        for part in read_as(name, parameter.shape, stored, config):
            if part.expert is None or local[0].start <= part.expert < local[0].stop:
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
        for part in stored_as(name, parameter.shape, model.config)
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
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    files: dict[str, str],
    total_bytes: int,
    quantization: dict[str, Any] | None = None,
    wrapper: dict[str, Any] | None = None,
) -> None:
    """Writes everything but the tensors: `config.json` and, if they are in several `files`, their index.

    quantization: how the weights are stored, if not in `dtype`: the `quantization_config` of `config.json`.
    wrapper: the `config.json` of the model around the language model that `config` describes, if it is written too.
    """
    if len(set(files.values())) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": files})
    values = to_hugging_face(config, name_of(dtype))
    values = values if wrapper is None else with_text_settings(wrapper, values)
    _write_json(folder / "config.json", values | ({"quantization_config": quantization} if quantization else {}))


def read_config(folder: Path) -> ModelConfig:
    """The folder's settings, with end-of-text tokens also from `generation_config.json`. The output head is only
    tied if the files have no other, and the environment may lower the number of positions. Raises UserError."""
    if is_adapter_folder(folder):
        return with_adapter(folder, read_config(base_folder(folder)))
    values, where = config_values(folder)
    if (folder / SETTINGS).is_file():
        raise UserError(
            f"{folder}: has both a model (config.json) and an adapter ({SETTINGS}), which transformers would apply to "
            "it; move the adapter's files to a separate folder, or delete them"
        )
    config = from_hugging_face(values, where, partial(_tensor_names, folder))
    ends = dict.fromkeys([*config.eos_token_ids, *generation_ends(folder)])
    tied = config.tie_embeddings and not has_untied_head(folder)
    longest = min(config.max_positions, positions_limit() or config.max_positions)
    return dataclasses.replace(config, eos_token_ids=tuple(ends), tie_embeddings=tied, max_positions=longest)


def _tensor_names(folder: Path) -> Collection[str]:
    """The names of the folder's tensors; none if they cannot be read."""
    try:
        return tensor_files(folder)
    except UserError:
        return ()


def refuse_score_head(config: ModelConfig, name: str) -> None:
    """Raises UserError, naming the model, if it is a reward model, which does not predict a next token."""
    if config.score_head:
        raise UserError(
            f"{name}: is a reward model, which scores a text and predicts no next token; give a language model here, "
            "and the reward model as lockstep rl --reward-model"
        )


def _shards(tensors: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write_json(path: Path, values: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n")
    partial.replace(path)
